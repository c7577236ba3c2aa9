"""Small tasks, networks, image folders, pruners and selectors for the tests."""

import os
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

import cps

ACCELERATOR = os.environ.get("CPS_TEST_ACCELERATOR", "cpu")
ROUNDING = {} if ACCELERATOR == "cpu" else {"rtol": 5e-3, "atol": 5e-3}  # a GPU predicts in half precision


class ListDataset(Dataset):
    """A dataset of images and labels without `targets`, so its labels are known only by reading it."""

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
    """Make every task predict by its compact subnetwork, even where that is not faster."""
    tasks = range(len(learner.network.subnetworks))
    learner.network._compact._networks = {task: learner.extract(task).backbone for task in tasks}


def make_task(first=0, *, classes=2, images=24, shape=(2, 6, 6), seed=0, test=12):
    """Return a task with classes `first`, `first + 1`, ...: noise around one random pattern per class."""
    draws = torch.Generator().manual_seed(1000 * seed + first)
    names = list(range(first, first + classes))
    patterns = {name: torch.randn(shape, generator=draws) for name in names}

    def draw(number):
        labels = [names[index % classes] for index in range(number)]
        noise = 0.5 * torch.randn(number, *shape, generator=draws)
        return torch.stack([patterns[label] for label in labels]) + noise, labels

    return cps.Task(names, train=draw(images), test=draw(test))


def write_image_folder(folder, classes, *, images=12, size=8, seed=0):
    """Write FOLDER/class/*.png: noise around a pattern that depends only on the name of the class."""
    for name in classes:
        (folder / name).mkdir(parents=True)
        pattern = np.random.default_rng(list(name.encode())).integers(0, 256, (size, size, 3))
        for index in range(images):
            noise = np.random.default_rng([seed, index]).normal(0, 25, (size, size, 3))
            picture = (pattern + noise).clip(0, 255).astype(np.uint8)
            Image.fromarray(picture).save(folder / name / f"{index}.png")
    return folder


class DropoutNet(nn.Sequential):
    """A network with dropout, so that its training depends on random numbers."""

    def __init__(self):
        super().__init__(*conv_net(), nn.Dropout(0.3))


@cps.setting
@dataclass(frozen=True)
class EveryOther:
    """A custom pruner: keep every other connection."""

    offset: int = 0

    def __call__(self, backbone, masks, batches):
        return {
            n: m & (torch.arange(m.numel()).reshape(m.shape) % 2 == self.offset).to(m.device) for n, m in masks.items()
        }


@dataclass(frozen=True)
class Energy:
    """A custom selector: the mean log-sum-exp of the logits."""

    name = "Energy"

    def observe(self, subnetwork, evidence, labels, earlier):
        return {"count": torch.tensor([float(len(labels))])}

    def __call__(self, evidence, statistics, groups):
        energies = torch.stack([outputs.logits.logsumexp(dim=1) for outputs in evidence], dim=1)
        return torch.stack([energies[groups == group].mean(dim=0) for group in range(int(groups.max()) + 1)])


class Counts(cps.MaxOutput):
    """A custom selector that keeps integers."""

    name = "Counts"

    def observe(self, subnetwork, evidence, labels, earlier):
        return {"counts": torch.bincount(labels)}
