"""A short training, and what several tests of methods measure."""

from operator import eq

import torch

import cps
from cps.methods.blocks.memory import Memory
from samples import conv_net, make_task

QUICK = cps.Training(2, cps.Adam(1e-2), batch_size=16)
ONE_EPOCH = cps.Training(1, cps.Adam(1e-2), batch_size=16)  # of a further phase
LONGER = cps.Training(10, cps.Adam(2e-2), batch_size=16)
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


def make(kind, fabric, **settings):
    """Return a method with a new small network, the same for all methods."""
    torch.manual_seed(0)
    return kind(conv_net(), fabric=fabric, **{"train": QUICK, **settings})


def learn_two_tasks(method):
    """Return how far the second task moves the scores of the first, and its own accuracy with the task known."""
    first, second = (make_task(10 * index, images=48) for index in range(2))
    method.learn(first)
    images, (test, labels) = first.test[0], second.test
    before = method.evidence(images)[0].logits
    method.learn(second)
    moved = (method.evidence(images)[0].logits - before).norm() / before.norm()
    right = sum(found == label for found, label in zip(method.predict(test, task=1).classes, labels, strict=True))
    return moved.item(), right / len(labels)


def right_after_three_tasks(method):
    """Return how many of its 12 test images a method finds the class of, for each of three tasks."""
    tasks = [make_task(10 * index, images=48) for index in range(3)]
    for task in tasks:
        method.learn(task)
    found = [method.predict(task.test[0]).classes for task in tasks]
    return [sum(map(eq, classes, task.test[1])) for classes, task in zip(found, tasks, strict=True)]
