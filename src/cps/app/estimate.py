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

from cps.closed_form.spaces import Pretrained
from cps.data.batch_transform import BatchTransform
from cps.data.decode import ImageError
from cps.data.examples import TensorExamples
from cps.data.image_folder import ImageFolder
from cps.data.rotations import RotationScheme, make_views
from cps.learner import Learner
from cps.network.classifier import Classifier
from cps.runtime.cuda_graphs import WARMUP_CALLS
from cps.runtime.seeding import seeded
from cps.training.trainer import Epoch, Trainer

TIMED_BATCHES = 2
TIMED_IMAGES = 16  # for features of a frozen backbone
PRUNING_COST = 4  # epochs' worth of time per pruning round that sees all images
INFERENCE_COST = 0.3  # epochs' worth of time per forward pass of one subnetwork over all images


class Estimate(NamedTuple):
    """The approximate time in seconds and memory in bytes."""

    seconds: float
    memory: int


def estimate_frozen(learner: Learner, size: int, files: Sequence[Path]) -> Estimate:
    """Decode a few of the files, compute their features and scale up the time. The learner does not change."""
    some = [files[index] for index in range(0, len(files), max(1, len(files) // TIMED_IMAGES))][:TIMED_IMAGES]
    network = learner.network
    blank = torch.zeros(len(some), 3, size, size, dtype=torch.uint8)
    network.features([blank], Pretrained())  # the first pass of a process is slower
    start = time.monotonic()
    with suppress(ImageError):  # a damaged image is reported when all are decoded
        images = ImageFolder(files[0].parent.parent, size=size, files=some, skip_damaged=True).read().images
        network.features([images], Pretrained())
    seconds = (time.monotonic() - start) / len(some)
    weights = 4 * sum(parameter.numel() for parameter in network.backbone.parameters())
    pixels = 3 * size * size
    return Estimate(seconds * len(files), 3 * weights + pixels * len(files) + 64 * pixels * TIMED_IMAGES)


def estimate(learner: Learner, size: int, images: int, classes: int, rotations: RotationScheme) -> Estimate:
    """Train a copy of the backbone on noise for a moment and scale up the time. The learner does not change."""
    config, network = learner.config, learner.network
    batch_size = min(images, config.train.batch_size)
    noise = torch.randint(
        0, 256, (TIMED_BATCHES * batch_size, 3, size, size), generator=torch.Generator(), dtype=torch.uint8
    )
    backbone = copy.deepcopy(network.backbone)
    with torch.no_grad():
        activations, features = _activation_bytes(backbone.eval(), network.pixels(noise[:2]))
    with seeded(network.device, 0):
        head = nn.Linear(features, classes * rotations.num_rotations, device=network.device)
    warmup_epochs = WARMUP_CALLS if network.device.type == "cuda" else 1  # on a GPU, until the step is captured
    ends: list[float] = []

    def record_time(epoch: Epoch) -> None:
        ends.append(time.monotonic())

    Trainer(learner.fabric).fit(
        Classifier(backbone, head),
        TensorExamples(noise, torch.arange(len(noise)) % classes),
        replace(config.train, epochs=warmup_epochs + 1, batch_size=batch_size),
        seed=(0,),
        transform=BatchTransform(network.prepare, config.augment, rotations),
        after_epoch=record_time,
    )
    seconds_per_image = (ends[-1] - ends[-2]) / len(noise)
    passes = config.train.epochs + config.rounds * config.retrain.epochs
    passes += PRUNING_COST * config.rounds * min(1.0, config.prune_images / images)
    views = len(make_views(rotations.num_rotations, rotations.flips))
    passes += INFERENCE_COST * (1 + len(network.subnetworks)) * views
    weights = 4 * sum(parameter.numel() for parameter in backbone.parameters())
    pixels = 3 * size * size
    memory = 8 * weights + batch_size * (2 * activations + 4 * pixels) + 2 * images * pixels
    return Estimate(seconds_per_image * images * passes, memory)


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
