"""Fixtures for the tests of selection."""

import pytest
import torch

import cps
from samples import make_task


@pytest.fixture(scope="module")
def learner():
    """Return a learner of three tasks with classes 0, 1; 10, 11; 20, 21. Tests must not change it."""
    training = cps.Training(20, cps.Adam(1e-2), batch_size=16)
    torch.manual_seed(0)
    learner = cps.Learner(
        cps.SmallConvNet(2, (8, 12)), rounds=1, train=training, retrain=training,
        selectors=(cps.Cascade(size=8), cps.MaxOutput()), fabric=cps.make_fabric(accelerator="cpu"),
    )  # fmt: skip
    for first in (0, 10, 20):
        task = make_task(first, images=60, test=60)
        learner.learn(cps.Task(task.classes, train=task.train, val=task.test))
    return learner
