"""A short training, and reference steps, for the tests of methods."""

import torch

import cps
from cps.methods.blocks.memory import Memory

QUICK = cps.Training(2, cps.Adam(1e-2), batch_size=16)
MEMORY = Memory(21)  # three images of each of seven classes


def same_trajectory(first, second, tasks):
    """Return True if two methods have the same weights, to the bit, after each of some tasks."""
    for task in tasks:
        first.learn(task)
        second.learn(task)
        pairs = zip(first.model.state_dict().items(), second.model.state_dict().items(), strict=True)
        if not all(name == other and torch.equal(one, two) for (name, one), (other, two) in pairs):
            return False
    return True
