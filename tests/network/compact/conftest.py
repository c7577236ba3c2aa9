"""Fixtures for the tests of compact subnetworks."""

import pytest
import torch

import cps
from cps.runtime.devices import full_precision
from samples import make_task


def small_resnet():
    return cps.resnet18(2, (8, 12, 16, 24))


@pytest.fixture(scope="package")
def model(fabric, tmp_path_factory):
    """Return the model file of a ResNet that has learned two tasks."""
    torch.manual_seed(0)
    training = cps.Training(6, cps.Adam(1e-2, weight_decay=5e-3), batch_size=16)
    learner = cps.Learner(
        small_resnet(), pruner=cps.NNrelief(0.7), rounds=3, train=training, retrain=training, fabric=fabric,
        normalize=cps.Normalize((0.1, 0.2), (1.5, 2.0)),
    )  # fmt: skip
    for first in (0, 10):
        learner.learn(make_task(first, shape=(2, 8, 8)))
    path = tmp_path_factory.mktemp("model") / "model.cps"
    learner.save(path)
    return path


@pytest.fixture
def learner(model, fabric):
    """Return a fresh learner of that model file."""
    return cps.load(model, small_resnet(), fabric=fabric)


@pytest.fixture
def images():
    """Return test images of the first task."""
    return make_task(0, shape=(2, 8, 8)).test[0]


@pytest.fixture
def in_full_precision():
    """Let a GPU keep all bits of the inputs of convolutions."""
    with full_precision():
        yield
