"""Balanced sets: as many images of each new class as of each old one in memory."""

from functools import partial

import torch

from cps.data.examples import Examples, read_labels
from cps.methods.blocks.memory import Exemplars
from cps.methods.single_head import SingleHead
from cps.methods.task_training import TaskTraining

BALANCE = 1010  # purpose of a seed


def balanced_number(method: SingleHead, task: TaskTraining) -> int:
    """Return the largest number of images that every old class has in memory, and every new class in its task."""
    if not len(method.exemplars):
        return 0
    new = torch.bincount(read_labels(task.examples).cpu() - task.old, minlength=task.new)
    return min(*map(len, method.exemplars.images), *new.tolist())


def balanced_examples(method: SingleHead, task: TaskTraining, number: int) -> Examples:
    """Return `number` images of every class: the first in memory, and new ones that the memory would choose now."""
    assert method.memory is not None
    balanced = Exemplars()
    balanced.images = [images[:number] for images in method.exemplars.images]
    choose, features = method.memory.choose, partial(method.features_of, task.examples)
    balanced.add_classes(task.examples, task.labels.tolist(), number, choose, features, task.generator(BALANCE))
    examples = balanced.examples()
    assert examples is not None
    return examples
