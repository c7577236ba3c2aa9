"""Fixtures for all tests."""

import hypothesis
import pytest
import torch

import cps
from cps.runtime.devices import make_fabric
from samples import ACCELERATOR, conv_net, make_task

hypothesis.settings.register_profile("steady", derandomize=True, deadline=None)
hypothesis.settings.load_profile("steady")


@pytest.fixture(scope="session")
def fabric():
    return make_fabric(accelerator=ACCELERATOR)


@pytest.fixture
def make_learner(fabric):
    """Return a function that makes quick learners: 2 epochs, 1 round, 2 epochs."""

    def make(backbone=None, **settings):
        torch.manual_seed(0)
        quick = {
            "rounds": 1,
            "train": cps.Training(2, cps.Adam(1e-2), batch_size=16),
            "retrain": cps.Training(2, cps.Adam(1e-2), batch_size=16),
            "fabric": fabric,
        }
        return cps.Learner(backbone or conv_net(), **{**quick, **settings})

    return make


@pytest.fixture(scope="module")
def learned(fabric):
    """Return a learner of one task with classes 0 and 1; tests must not change it."""
    torch.manual_seed(0)
    quick = cps.Training(1, batch_size=16)
    learner = cps.Learner(conv_net(), rounds=1, train=quick, retrain=quick, fabric=fabric)
    learner.learn(make_task(0))
    return learner


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a learner with two tasks of named classes, and its model file; tests must not change them."""
    torch.manual_seed(0)
    training = cps.Training(1, cps.SGD(0.01), cps.Steps((1,), 0.5), batch_size=16)
    learner = cps.Learner(
        conv_net(), rounds=1, train=training, retrain=training, fabric=cps.make_fabric(accelerator="cpu"),
        normalize=cps.Normalize((0.5, 0.5), (0.2, 0.2)), augment=cps.Chain((cps.PadCrop(1), cps.Flip())),
    )  # fmt: skip
    images, labels = make_task(0).train
    learner.learn(cps.Task(["häschen", "cat\n"], train=(images, [label % 2 for label in labels])))
    learner.learn(make_task(10))
    path = tmp_path_factory.mktemp("model") / "model.cps"
    learner.save(path)
    return learner, path


def pytest_terminal_summary(terminalreporter):
    """Name the skipped tests whose reason is that nothing was tested; pytest itself lists reasons only with -rs."""
    for report in terminalreporter.stats.get("skipped", []):
        if "NOT TESTED" in str(report.longrepr):
            terminalreporter.write_line(f"{report.nodeid}: {report.longrepr[2]}", yellow=True)
