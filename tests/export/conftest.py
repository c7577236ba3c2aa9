"""Fixtures for the tests of exports."""

import onnxruntime
import pytest
import torch

import cps
from samples import make_task


@pytest.fixture(scope="package")
def learner():
    """Return a learner with a builtin backbone that has learned tasks of 2, 3 and 2 classes."""
    training = cps.Training(2, cps.Adam(1e-2), batch_size=16)
    learner = cps.Learner(
        cps.Architecture("small"), pruner=cps.NNrelief(0.8), rounds=1, train=training, retrain=training,
        normalize=cps.Normalize((0.1, 0.2, 0.3), (0.5, 0.6, 0.7)), fabric=cps.make_fabric(accelerator="cpu"),
    )  # fmt: skip
    for index, classes in enumerate((2, 3, 2)):
        learner.learn(make_task(10 * index, classes=classes, shape=(3, 8, 8)))
    return learner


@pytest.fixture(scope="package")
def model(learner, tmp_path_factory):
    """Return the learner's model file."""
    path = tmp_path_factory.mktemp("export") / "model.cps"
    learner.save(path)
    return path


@pytest.fixture(scope="package")
def images():
    """Return test images of all tasks."""
    found = torch.cat([make_task(10 * i, classes=c, shape=(3, 8, 8)).test[0] for i, c in enumerate((2, 3, 2))])
    return found.clamp(0, 1)


@pytest.fixture(scope="package")
def run_onnx():
    """Return a function that runs a graph and returns its outputs by name, and its metadata."""

    def run(path, images):
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        values = session.run(None, {"images": images.numpy()})
        names = [output.name for output in session.get_outputs()]
        outputs = {name: torch.from_numpy(value) for name, value in zip(names, values, strict=True)}
        return outputs, session.get_modelmeta().custom_metadata_map

    return run


@pytest.fixture(scope="package")
def all_tasks_graph(learner, tmp_path_factory):
    """Return the graph of all tasks."""
    path = tmp_path_factory.mktemp("graph") / "all.onnx"
    cps.export_all(learner, path)
    return path
