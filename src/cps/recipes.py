"""Recipes: one function for each experiment, returning all of its settings as plain data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from cps.augmentation import Augmentation, Chain, Flip, PadCrop
from cps.backbones import SmallConvNet, resnet18, resnet32
from cps.data import Data
from cps.pixels import Normalize
from cps.pruning import NNrelief, Pruner
from cps.scenario import Scenario, split_by_class
from cps.selection import ImportanceSignature, MaxOutput, Selector
from cps.settings import Adam, Cosine, Steps, Training, scaled

IMAGENET = Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True)
class Recipe:
    """One experiment: data, the cut into tasks, backbone and the learner's settings."""

    name: str
    about: str
    read: Callable[[Path | None], tuple[Data, Data]]
    sizes: int | Sequence[int]
    backbone: Callable[[], nn.Module]
    train: Training
    retrain: Training
    pruner: Pruner
    rounds: int = 3
    selectors: tuple[Selector, ...] = (MaxOutput(), ImportanceSignature())
    augment: Augmentation | None = None
    normalize: Normalize | None = None
    prune_images: int = 1000
    group_sizes: tuple[int, ...] = (1, 2, 5, 10, 20, 50)
    order: int | None = None

    def scenario(self, data: Path | None, order: int | None) -> Scenario:
        """Return the tasks, in the order of classes that a seed gives (None: sorted)."""
        train, test = self.read(data)
        return split_by_class(train, test, sizes=self.sizes, order=order)

    def learner_settings(self) -> dict[str, Any]:
        """Return what `Learner` takes of the recipe."""
        names = ("train", "retrain", "pruner", "rounds", "selectors", "augment", "normalize", "prune_images")
        return {name: getattr(self, name) for name in names}

    def scaled(self, epochs: float) -> "Recipe":
        """Return the recipe with `epochs` times the epochs, for a short trial."""
        return replace(self, train=scaled(self.train, epochs), retrain=scaled(self.retrain, epochs))


def digits() -> Recipe:
    """Return the demo: scikit-learn's 8x8 digits, five tasks of two, a small convolutional network."""
    return Recipe(
        name="digits",
        about="scikit-learn's 8x8 digits in 5 tasks of 2, a small convolutional network; the demo",
        read=read_digits,
        sizes=2,
        backbone=lambda: SmallConvNet(channels=1, widths=(64, 128, 128)),
        train=Training(20, Adam(lr=3e-3, weight_decay=5e-3), Cosine(), batch_size=32),
        retrain=Training(10, Adam(lr=3e-3, weight_decay=5e-3), Cosine(), batch_size=32),
        pruner=NNrelief(alpha=0.7),
        rounds=2,
    )


def read_digits(folder: Path | None = None) -> tuple[Data, Data]:
    """Return the digits that scikit-learn brings, four fifths to train and one fifth to test."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    train, test = train_test_split(np.arange(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    return (images[train], labels[train]), (images[test], labels[test])


def cifar100(tasks: int) -> Recipe:
    """Return the paper's CIFAR-100 in 5, 10 or 20 equal tasks: ResNet-18(1/3), Adam, three rounds."""
    return Recipe(
        name=f"cifar100-{tasks}",
        about=f"CIFAR-100 in {tasks} tasks of {100 // tasks}, ResNet-18(1/3); the paper's settings",
        read=read_cifar100,
        sizes=100 // tasks,
        backbone=lambda: resnet18(3, widths=(21, 42, 85, 170)),
        train=Training(70, Adam(1e-2, weight_decay=5e-4), Steps((20, 40, 60), 0.2), batch_size=128),
        retrain=Training(50, Adam(1e-2, weight_decay=5e-4), Steps((15, 25, 40), 0.2), batch_size=128),
        pruner=NNrelief(alpha=0.9),
        rounds=3,
        augment=Chain((PadCrop(4), Flip())),
        normalize=IMAGENET,
    )


def cifar100_b50(rounds: int = 1) -> Recipe:
    """Return the paper's CIFAR-100 in a task of 50 and five of 10: ResNet-32, signature; 0 rounds is CP&S-frozen."""
    frozen = ", convolutions frozen after the first task" if rounds == 0 else ""
    return Recipe(
        name="cifar100-b50" if rounds else "cifar100-b50-frozen",
        about=f"CIFAR-100 in a task of 50 and 5 of 10, ResNet-32{frozen}; the paper's settings",
        read=read_cifar100,
        sizes=(50, 10, 10, 10, 10, 10),
        backbone=resnet32,
        train=Training(160, Adam(1e-3, weight_decay=5e-4), Steps((80, 120), 0.1), batch_size=128),
        retrain=Training(50, Adam(1e-3, weight_decay=5e-4), Steps((20, 35), 0.1), batch_size=128),
        pruner=NNrelief(alpha=0.9),
        rounds=rounds,
        selectors=(ImportanceSignature(norm=1), ImportanceSignature(norm=2), MaxOutput()),
        augment=Chain((PadCrop(4), Flip())),
        normalize=IMAGENET,
        group_sizes=(1, 2, 5, 10, 20, 50, 60),
    )


def read_cifar100(folder: Path | None) -> tuple[Data, Data]:
    """Return CIFAR-100 from a folder that holds `cifar-100-python`, or that it can be downloaded to."""
    from torchvision.datasets import CIFAR100

    root = folder or Path("data")
    parts = []
    for train in (True, False):
        try:
            part = CIFAR100(root, train=train, download=not (root / CIFAR100.base_folder).is_dir())
        except (RuntimeError, OSError) as error:
            raise ValueError(
                f"CIFAR-100 is not in '{root}', or is damaged, and cannot be downloaded ({error}); put the unpacked "
                f"folder '{CIFAR100.base_folder}' there, or name another folder with --data"
            ) from error
        parts.append((torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous(), part.targets))
    return parts[0], parts[1]


RECIPES: dict[str, Callable[[], Recipe]] = {
    "digits": digits,
    "cifar100-5": partial(cifar100, 5),
    "cifar100-10": partial(cifar100, 10),
    "cifar100-20": partial(cifar100, 20),
    "cifar100-b50": cifar100_b50,
    "cifar100-b50-frozen": partial(cifar100_b50, 0),
}
