"""Estimate the time and memory of learning a folder from a few of its images or from a few real training steps."""

import copy
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cps.app.frozen_folder import BATCH
from cps.closed_form.spaces import Pretrained
from cps.config import LearnerConfig
from cps.data.batch_transform import BatchTransform
from cps.data.decode import ImageError, ImageFormat
from cps.data.examples import TensorExamples
from cps.data.image_folder import ImageFolder
from cps.data.rotations import RotationScheme, make_views
from cps.learner import Learner
from cps.network.classifier import Classifier
from cps.runtime.cuda_graphs import WARMUP_CALLS
from cps.runtime.seeding import seeded
from cps.runtime.text import format_duration
from cps.training.cached_maps import CachedMaps
from cps.training.trainer import Epoch, Trainer

TIMED_BATCHES = 2
TIMED_IMAGES = 16  # for features of a frozen backbone
PRUNING_COST = 4  # epochs' worth of time per pruning round that sees all images
INFERENCE_COST = 0.3  # epochs' worth of time per forward pass of one subnetwork over all images


class Estimate(NamedTuple):
    """The approximate time in seconds and memory in bytes."""

    seconds: float
    memory: int


def estimate_frozen(learner: Learner, image_format: ImageFormat, files: Sequence[Path]) -> Estimate:
    """Decode a few of the files, compute their features and scale up the time. The learner does not change."""
    some = [files[index] for index in range(0, len(files), max(1, len(files) // TIMED_IMAGES))][:TIMED_IMAGES]
    network, (size, margin) = learner.network, image_format
    blank = torch.zeros(len(some), 3, size, size, dtype=torch.uint8)
    width = network.features([blank], Pretrained()).shape[1]  # the first pass of a process is slower
    start = time.monotonic()
    with suppress(ImageError):  # a damaged image is reported when all are decoded
        folder = ImageFolder(files[0].parent.parent, size=size, margin=margin, files=some, skip_damaged=True)
        network.features([folder.read().images], Pretrained())
    seconds = (time.monotonic() - start) / len(some)
    weights = 4 * sum(parameter.numel() for parameter in network.backbone.parameters())
    pixels = 3 * size * size
    features = 3 * 4 * width * len(files)  # a copy of the training images, and one in float64 for a part of them
    return Estimate(seconds * len(files), 3 * weights + features + 2 * BATCH * pixels + 64 * pixels * TIMED_IMAGES)


def estimate(learner: Learner, size: int, images: int, classes: int, rotations: RotationScheme) -> Estimate:
    """Train a copy of the backbone on noise for a moment and scale up the time. The learner does not change."""
    config = replace(learner.config, rotations=rotations)
    return Measured.of(learner, config, size, images, classes).estimate(config, size, images)


def affordable_epochs(learner: Learner, size: int, images: int, classes: int, seconds: float) -> int:
    """Return the epochs of dense training for which there is time; raise `ValueError` if there is none for any."""
    return Measured.of(learner, learner.config, size, images, classes).affordable_epochs(
        learner.config, images, seconds
    )


class Measured(NamedTuple):
    """What a few steps have shown: the seconds for a map of the trunk and for training on an image, and bytes."""

    tasks: int
    seconds_per_map: float
    seconds_per_image: float
    map_bytes: int
    activations: int
    weights: int

    @classmethod
    def of(cls, learner: Learner, config: LearnerConfig, size: int, images: int, classes: int) -> "Measured":
        """Train a copy of the learner's backbone on noise for a moment."""
        network, rotations = learner.network, config.rotations
        batch_size = min(images, config.train.batch_size)
        noise = torch.randint(
            0, 256, (TIMED_BATCHES * batch_size, 3, size, size), generator=torch.Generator(), dtype=torch.uint8
        )
        backbone = copy.deepcopy(network.backbone)
        with torch.no_grad():
            activations, features = _activation_bytes(backbone.eval(), network.pixels(noise[:2]))
        with seeded(network.device, 0):
            head = nn.Linear(features, classes * rotations.num_rotations, device=network.device)
        labels = torch.arange(len(noise)) % classes
        examples = TensorExamples(noise, labels)
        transform = BatchTransform(network.prepare, config.augment, rotations)
        seconds_per_map, map_bytes = 0.0, 0
        if network.trunk is not None:
            network.maps(noise[:2])  # the first pass of a process is slower
            start = time.monotonic()
            maps = CachedMaps(network.maps(noise).values[:, None], labels, network.prepare.dtype)
            seconds_per_map, map_bytes = (time.monotonic() - start) / len(noise), maps.values[0].nbytes
            examples, transform = maps.examples, maps.transform
        seconds_per_image = _seconds_per_epoch(learner, Classifier(backbone, head), examples, transform) / len(noise)
        weights = 4 * sum(parameter.numel() for parameter in backbone.parameters())
        return cls(len(network.subnetworks), seconds_per_map, seconds_per_image, map_bytes, activations, weights)

    def estimate(self, config: LearnerConfig, size: int, images: int) -> Estimate:
        """Return the time and memory of learning so many images with these settings."""
        passes = config.train.epochs + config.rounds * config.retrain.epochs
        passes += PRUNING_COST * config.rounds * min(1.0, config.prune_images / images)
        views = len(make_views(config.rotations.num_rotations, config.rotations.flips))
        passes += INFERENCE_COST * (1 + self.tasks) * views
        copies = 1 if config.augment is None else config.map_copies
        pixels = 3 * size * size
        memory = 8 * self.weights + min(images, config.train.batch_size) * (2 * self.activations + 4 * pixels)
        memory += images * (2 * pixels + copies * self.map_bytes)
        return Estimate(images * (self.seconds_per_image * passes + self.seconds_per_map * copies), memory)

    def affordable_epochs(self, config: LearnerConfig, images: int, seconds: float) -> int:
        """Return the epochs of dense training, at most those of `config`, that fit into the time.

        Half as many follow each pruning round. Raise `ValueError` if not even one fits.
        """

        def expected(epochs: int) -> float:
            train, retrain = replace(config.train, epochs=epochs), replace(config.retrain, epochs=max(1, epochs // 2))
            return self.estimate(replace(config, train=train, retrain=retrain), 0, images).seconds

        fitting = [epochs for epochs in range(1, config.train.epochs + 1) if expected(epochs) <= seconds]
        if not fitting:
            least = format_duration(expected(1))
            raise ValueError(
                f"training takes at least {least} for these images, longer than the time given by --minutes"
            )
        return fitting[-1]


def _seconds_per_epoch(
    learner: Learner, model: Classifier, examples: TensorExamples, transform: BatchTransform
) -> float:
    """Train a classifier for a moment; return the time of its last epoch."""
    warmup_epochs = WARMUP_CALLS if learner.network.device.type == "cuda" else 1  # on a GPU, until a step is captured
    batch_size = min(len(examples), learner.config.train.batch_size)
    ends: list[float] = []

    def record_time(_epoch: Epoch) -> None:
        ends.append(time.monotonic())

    Trainer(learner.fabric).fit(
        model,
        examples,
        replace(learner.config.train, epochs=warmup_epochs + 1, batch_size=batch_size),
        seed=(0,),
        transform=transform,
        after_epoch=record_time,
    )
    return ends[-1] - ends[-2]


def _activation_bytes(backbone: nn.Module, pixels: Tensor) -> tuple[int, int]:
    """Return the bytes of all activations of a backbone for one image, and the number of its features."""
    sizes: list[int] = []

    def record_size(_module: nn.Module, _inputs: object, output: object) -> None:
        if isinstance(output, Tensor):
            sizes.append(output.nbytes // len(pixels))

    hooks = [m.register_forward_hook(record_size) for m in backbone.modules() if not list(m.children())]
    features = backbone(pixels).shape[1]
    for hook in hooks:
        hook.remove()
    return sum(sizes), features
