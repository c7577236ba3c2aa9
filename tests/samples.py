"""Small tasks, networks and image folders for the tests."""

import os

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

import cps

ACCELERATOR = os.environ.get("CPS_TEST_ACCELERATOR", "cpu")
ROUNDING = {} if ACCELERATOR == "cpu" else {"rtol": 5e-3, "atol": 5e-3}  # a GPU predicts in half precision


class ListDataset(Dataset):
    """Images and labels as a data set, which tells nothing before it is read."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


def conv_net(channels=2):
    """Return a plain convolutional network with biases and a batch norm layer."""
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def use_all_compact(learner):
    """Let every task predict by its small network, whether that pays or not."""
    tasks = range(len(learner.network.subnetworks))
    learner.network._compact._networks = {task: learner.extract(task).backbone for task in tasks}


def make_task(first=0, *, classes=2, images=24, shape=(2, 6, 6), seed=0, test=12):
    """Return a task whose classes `first`, `first + 1`, ... are noise around a pattern of their own."""
    draws = torch.Generator().manual_seed(1000 * seed + first)
    names = list(range(first, first + classes))
    patterns = {name: torch.randn(shape, generator=draws) for name in names}

    def draw(number):
        labels = [names[index % classes] for index in range(number)]
        noise = 0.5 * torch.randn(number, *shape, generator=draws)
        return torch.stack([patterns[label] for label in labels]) + noise, labels

    return cps.Task(names, train=draw(images), test=draw(test))


def write_image_folder(folder, classes, *, images=12, size=8, seed=0):
    """Write FOLDER/class/*.png: noise around a pattern that depends on the name of the class alone."""
    for name in classes:
        (folder / name).mkdir(parents=True)
        pattern = np.random.default_rng(list(name.encode())).integers(0, 256, (size, size, 3))
        for index in range(images):
            noise = np.random.default_rng([seed, index]).normal(0, 25, (size, size, 3))
            picture = (pattern + noise).clip(0, 255).astype(np.uint8)
            Image.fromarray(picture).save(folder / name / f"{index}.png")
    return folder
