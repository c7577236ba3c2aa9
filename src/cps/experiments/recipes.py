"""Recipes: one function for each experiment, which returns all of its settings as plain data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cps.closed_form.spaces import Pretrained, RandomPatches
from cps.config import SETTINGS
from cps.data.augmentation import Augmentation, Chain, Colour, Flip, PadCrop, ResizedCrop
from cps.data.datasets import (
    read_cifar100,
    read_cub200,
    read_digits,
    read_image_folders,
    read_imagenet100,
)
from cps.data.examples import Data
from cps.data.image_folder import ImageFolder
from cps.data.normalize import IMAGENET, Normalize
from cps.data.rotations import Rotations, RotationScheme
from cps.data.tasks import Scenario, split_by_class
from cps.network.architectures import Architecture
from cps.network.backbones import SmallConvNet
from cps.network.capacity import Capacity
from cps.network.pretrained import load_imagenet_weights
from cps.pruning.base import Pruner
from cps.pruning.nnrelief import NNrelief
from cps.runtime.seeding import seeded
from cps.selection.base import Selector
from cps.selection.cascade import Cascade
from cps.selection.fusion import Fusion
from cps.selection.importance_signature import ImportanceSignature
from cps.selection.max_output import MaxOutput
from cps.selection.shared_space import SharedSpace
from cps.training.losses import Contrastive, SmoothedCrossEntropy
from cps.training.settings import SGD, Adam, Cosine, MakeOptimizer, Steps, Training, scale_epochs

ALL_SELECTORS = (
    Fusion(), SharedSpace(), Cascade(), MaxOutput(), ImportanceSignature(norm=2), ImportanceSignature(norm=1)
)  # fmt: skip
JOINT_CIFAR = Training(100, SGD(0.1, weight_decay=5e-4), Cosine(), batch_size=128)  # joint training on CIFAR-100
PAPER_CAPACITY = Capacity(min_free=0.0)  # every task starts from all sealed weights
PAPER_CASCADE = Cascade(size=32, shrinkage=0.1)  # the cascade of the published runs with the paper's training
SINGLE_IMAGE_CASCADE = Cascade(  # for tasks with many images and long training
    size=64, shrinkage=0.1, temperature=5.0, logit_weight=2.0, covariance_pooling=0.7, mean_contraction=0.8
)


@dataclass(frozen=True)
class Recipe:
    """One experiment: the data, the classes per task, the backbone and the settings of the learner.

    `joint` holds the settings of joint training if `train` would make it a poor upper bound. `pretrained` loads weights
    into a new backbone. `about` and `cost` are texts for `cps bench --list`.
    """

    name: str
    about: str
    read: Callable[[Path | None], tuple[Data, Data]]
    sizes: int | Sequence[int]
    backbone: Callable[[], nn.Module]
    train: Training
    retrain: Training
    pruner: Pruner
    rounds: int = 3
    selectors: tuple[Selector, ...] = (MaxOutput(), ImportanceSignature(), Cascade())
    augment: Augmentation | None = None
    rotations: RotationScheme | None = None
    normalize: Normalize | None = None
    prune_images: int = 1000
    trunk: str | None = None
    map_copies: int = 8
    capacity: Capacity | None = None
    group_sizes: tuple[int, ...] = (1, 2, 5, 10, 20, 50)
    order: int | None = None
    joint: Training | None = None
    pretrained: Callable[[nn.Module, Path | None], None] | None = None
    cost: str = ""

    def scenario(
        self, data: Path | None, order: int | str | None, on_progress: Callable[[int, int], None] | None = None
    ) -> Scenario:
        """Return the tasks; `order` is the seed or the name of the class order (None: sorted).

        Images in files are decoded when a task is learned. `on_progress(done, total)` is called meanwhile.
        """
        train, test = self.read(data)
        for part in (train, test):
            if isinstance(part, ImageFolder):
                part.on_progress = on_progress
        return split_by_class(train, test, sizes=self.sizes, order=order)

    def make_backbone(self, seed: int) -> nn.Module:
        """Return a new backbone whose values depend only on the seed."""
        with seeded(torch.device("cpu"), seed):
            return self.backbone()

    def learner_settings(self) -> dict[str, Any]:
        """Return the settings that `Learner` takes, without the seed."""
        return {name: getattr(self, name) for name in SETTINGS if name != "seed"}

    def with_selector(self, name: str) -> "Recipe":
        """Return the recipe with the selector of that name as the first one, which predicts."""
        known = {selector.name: selector for selector in (*ALL_SELECTORS, *self.selectors)}
        if name not in known:
            raise ValueError(f"unknown selector '{name}'; choose from: {', '.join(known)}")
        others = tuple(selector for selector in self.selectors if selector.name != name)
        return replace(self, selectors=(known[name], *others))

    def with_scaled_epochs(self, factor: float) -> "Recipe":
        """Return the recipe with `factor` times the epochs, for a short trial."""
        return replace(
            self,
            train=scale_epochs(self.train, factor),
            retrain=scale_epochs(self.retrain, factor),
            joint=self.joint and scale_epochs(self.joint, factor),
        )


def digits() -> Recipe:
    """Return the demo: 8x8 handwritten digits in five tasks of two classes, with a small convolutional network."""
    return Recipe(
        name="digits",
        about="The demo: 8x8 handwritten digits in 5 tasks of 2, small network",
        read=read_digits,
        sizes=2,
        cost="1 min on 2 cores",
        backbone=lambda: SmallConvNet(channels=1, widths=(64, 128, 128)),
        train=Training(20, Adam(lr=3e-3, weight_decay=5e-3), Cosine(), batch_size=32),
        retrain=Training(10, Adam(lr=3e-3, weight_decay=5e-3), Cosine(), batch_size=32),
        pruner=NNrelief(alpha=0.7),
        rounds=2,
        selectors=(Fusion(), Cascade(), MaxOutput(), ImportanceSignature()),
    )


def cifar100(tasks: int) -> Recipe:
    """Return the paper's CIFAR-100 in 5, 10 or 20 equal tasks (or more): ResNet-18(1/3), Adam, three pruning rounds."""
    return Recipe(
        name=f"cifar100-{tasks}",
        about=f"CIFAR-100 in {tasks} tasks of {100 // tasks}, ResNet-18(1/3), trained as in the paper",
        read=read_cifar100,
        sizes=100 // tasks,
        cost="3 min on an H200",
        backbone=Architecture("resnet18-third"),
        train=Training(70, Adam(1e-2, weight_decay=5e-4), Steps((20, 40, 60), 0.2), batch_size=128),
        retrain=Training(50, Adam(1e-2, weight_decay=5e-4), Steps((15, 25, 40), 0.2), batch_size=128),
        pruner=NNrelief(alpha=0.9),
        rounds=3,
        selectors=(MaxOutput(), ImportanceSignature(), PAPER_CASCADE),
        augment=Chain((PadCrop(4), Flip())),
        normalize=IMAGENET,
        joint=JOINT_CIFAR,
        capacity=PAPER_CAPACITY,
    )


def cifar100_small() -> Recipe:
    """Return CIFAR-100 in ten tasks for a CPU: ResNet-8, and 20 passes over the images of a task.

    Held-out training images of the first three tasks chose the learning rate, the epochs and alpha.
    """
    training = Training(8, Adam(3e-3, weight_decay=5e-4), Cosine(), batch_size=64)
    return Recipe(
        name="cifar100-10-small",
        about="CIFAR-100 in 10 tasks of 10 for a CPU: ResNet-8, 20 passes over the images of a task",
        read=read_cifar100,
        sizes=10,
        cost="10 min on 2 cores",
        backbone=Architecture("resnet8"),
        train=training,
        retrain=replace(training, epochs=6),
        pruner=NNrelief(alpha=0.9),
        rounds=2,
        selectors=(Fusion(), Cascade(), MaxOutput(), ImportanceSignature()),
        augment=Chain((PadCrop(4), Flip())),
        normalize=IMAGENET,
    )


def imagenet(classes: int, optimizer: MakeOptimizer, suffix: str = "") -> Recipe:
    """Return the paper's ImageNet in ten tasks: ResNet-18, one pruning round.

    The folder of data must have the images as train/CLASS and val/CLASS.
    """
    return Recipe(
        name=f"imagenet{classes}{suffix}",
        about=f"ImageNet, {classes} classes in 10 tasks, ResNet-18, {type(optimizer).__name__}; the paper's settings",
        read=read_imagenet100 if classes == 100 else read_image_folders,
        sizes=classes // 10,
        cost=f"about {classes // 6} min on an H200, plus decoding",
        backbone=Architecture("resnet18-large"),
        train=Training(90, optimizer, Steps((30, 60), 0.1), batch_size=128),
        retrain=Training(30, optimizer, Steps((10, 20), 0.1), batch_size=128),
        pruner=NNrelief(alpha=0.9),
        rounds=1,
        augment=Chain((ResizedCrop(), Flip())),
        normalize=IMAGENET,
        capacity=PAPER_CAPACITY,
        order=1993,
    )


def cub200() -> Recipe:
    """Return the paper's CUB-200 in four tasks of 50: ResNet-18 with ImageNet weights, one pruning round."""
    optimizer = SGD(1e-2, weight_decay=1e-4)
    return Recipe(
        name="cub200",
        about="CUB-200-2011 in 4 tasks of 50, ResNet-18 with ImageNet weights; the paper's settings",
        read=read_cub200,
        sizes=50,
        cost="3 min on an H200",
        backbone=Architecture("resnet18-large"),
        pretrained=load_imagenet_weights,
        train=Training(40, optimizer, Steps((20, 30), 0.1), batch_size=64),
        retrain=Training(30, optimizer, Steps((10, 20), 0.1), batch_size=64),
        pruner=NNrelief(alpha=0.95),
        rounds=1,
        selectors=(MaxOutput(), ImportanceSignature(), PAPER_CASCADE),
        augment=Chain((ResizedCrop(), Flip())),
        normalize=IMAGENET,
        capacity=PAPER_CAPACITY,
        prune_images=100,
    )


def cub200_trunk() -> Recipe:
    """Return CUB-200 in four tasks behind a frozen trunk, the first layers of ResNet-18: for a CPU.

    The settings are those that `cps learn --minutes` takes behind a trunk.
    """
    training = Training(10, SGD(1e-2, weight_decay=5e-4), Cosine(), batch_size=64, loss=SmoothedCrossEntropy(0.1))
    return replace(
        cub200(),
        name="cub200-trunk",
        about="CUB-200-2011 in 4 tasks of 50, behind a frozen trunk of ResNet-18 with ImageNet weights",
        cost="",
        trunk="layer3",
        map_copies=4,
        train=training,
        retrain=replace(training, epochs=5),
        selectors=(Fusion(SharedSpace(Pretrained(), flips=True)), Cascade(), MaxOutput()),
        capacity=None,
    )


def cifar100_b50(rounds: int = 1) -> Recipe:
    """Return the paper's CIFAR-100 in a task of 50 and five of 10: ResNet-32, importance signature.

    With 0 rounds it is CP&S-frozen.
    """
    frozen = ", convolutions frozen after the first task" if rounds == 0 else ""
    return Recipe(
        name="cifar100-b50" if rounds else "cifar100-b50-frozen",
        about=f"CIFAR-100 in a task of 50 and 5 of 10, ResNet-32{frozen}; the paper's settings",
        read=read_cifar100,
        sizes=(50, 10, 10, 10, 10, 10),
        cost="4 min on an H200",
        backbone=Architecture("resnet32"),
        train=Training(160, Adam(1e-3, weight_decay=5e-4), Steps((80, 120), 0.1), batch_size=128),
        retrain=Training(50, Adam(1e-3, weight_decay=5e-4), Steps((20, 35), 0.1), batch_size=128),
        pruner=NNrelief(alpha=0.9),
        rounds=rounds,
        selectors=(ImportanceSignature(norm=1), ImportanceSignature(norm=2), MaxOutput(), PAPER_CASCADE),
        augment=Chain((PadCrop(4), Flip())),
        normalize=IMAGENET,
        joint=JOINT_CIFAR,
        capacity=PAPER_CAPACITY,
        group_sizes=(1, 2, 5, 10, 20, 50, 60),
    )


def cifar100_single(name: str, sizes: int | Sequence[int]) -> Recipe:
    """Return CIFAR-100 with settings for single images: ResNet-18, four rotations, contrastive loss, cascade."""
    train = Training(80, SGD(0.1, weight_decay=5e-4), Cosine(), batch_size=128, loss=Contrastive())
    return Recipe(
        name=f"cifar100-{name}-single",
        about=f"CIFAR-100, tasks as in cifar100-{name}, trained for single images: ResNet-18, four rotations, cascade",
        read=read_cifar100,
        sizes=sizes,
        cost="8 min on an H200",
        backbone=Architecture("resnet18"),
        train=train,
        retrain=replace(train, epochs=30),
        pruner=NNrelief(alpha=0.9),
        rounds=3,
        selectors=(SINGLE_IMAGE_CASCADE, MaxOutput()),
        augment=Chain((ResizedCrop((0.3, 1.0)), Flip(), Colour())),
        rotations=Rotations(at_once=True, flips=True),
        normalize=IMAGENET,
        capacity=Capacity(budget=0.01),
        joint=JOINT_CIFAR,
    )


def with_fusion(make: Callable[[], Recipe], task_weight: float, class_weight: float) -> Recipe:
    """Return a recipe that selects with a fusion and keeps its other selectors.

    All training images are learned, so none is held out to choose the weights: `studies.fusion_settings` did it for
    one order.
    """
    recipe = make()
    cascade = next(selector for selector in recipe.selectors if isinstance(selector, Cascade))
    space = Pretrained() if recipe.pretrained is not None else RandomPatches(800)
    fusion = Fusion(SharedSpace(space, flips=True), cascade, task_weight, class_weight)
    return replace(
        recipe,
        name=f"{recipe.name}-fusion",
        about=f"{recipe.name} with a fusion of cascade and closed form",
        selectors=(fusion, *recipe.selectors),
    )


RECIPES: dict[str, Callable[[], Recipe]] = {
    "digits": digits,
    "cifar100-5": partial(cifar100, 5),
    "cifar100-10": partial(cifar100, 10),
    "cifar100-20": partial(cifar100, 20),
    "cifar100-50": partial(cifar100, 50),
    "cifar100-10-small": cifar100_small,
    "cifar100-b50": cifar100_b50,
    "cifar100-b50-frozen": partial(cifar100_b50, 0),
    "cifar100-5-single": partial(cifar100_single, "5", 20),
    "cifar100-10-single": partial(cifar100_single, "10", 10),
    "cifar100-20-single": partial(cifar100_single, "20", 5),
    "cifar100-b50-single": partial(cifar100_single, "b50", (50, 10, 10, 10, 10, 10)),
    "imagenet100": partial(imagenet, 100, SGD(0.1)),
    "imagenet100-adam": partial(imagenet, 100, Adam(1e-2, weight_decay=1e-4), "-adam"),
    "imagenet1000": partial(imagenet, 1000, SGD(0.1)),
    "imagenet1000-adam": partial(imagenet, 1000, Adam(1e-2, weight_decay=1e-4), "-adam"),
    "cub200": cub200,
    "cub200-trunk": cub200_trunk,
}
# Held-out images chose the weights for 10, 20 and 50 tasks and for cifar100-10-single; the others are those of recipes
# like them.
FUSION_WEIGHTS = {
    "cifar100-5": 1.0, "cifar100-10": 1.0, "cifar100-20": 0.5, "cifar100-50": 0.25, "cub200": 0.25,
    "cifar100-5-single": 2.0, "cifar100-10-single": 2.0, "cifar100-20-single": 2.0, "cifar100-b50-single": 2.0,
}  # fmt: skip
RECIPES |= {
    f"{name}-fusion": partial(with_fusion, RECIPES[name], weight, weight) for name, weight in FUSION_WEIGHTS.items()
}
