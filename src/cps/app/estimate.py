"""An estimate, before learning starts, of how long it will take and how much memory: from a few real steps."""

import copy
import time
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cps.data.batch_transform import BatchTransform
from cps.data.examples import TensorExamples
from cps.data.rotations import views_of
from cps.learner import Learner
from cps.network.classifier import Classifier
from cps.runtime.cuda_graphs import WARM_CALLS
from cps.runtime.seeding import seeded
from cps.training.trainer import Epoch, Trainer

BATCHES = 2  # that are timed
PRUNING = 4  # epochs that pruning costs, where it looks at all images
LOOKING = 0.3  # epochs that it costs to let a subnetwork look at all images


class Estimate(NamedTuple):
    """About how long learning takes, and how many bytes of memory."""

    seconds: float
    memory: int


def estimate(learner: Learner, size: int, images: int, classes: int) -> Estimate:
    """Train a copy of the backbone on noise for a moment, and scale up the time; nothing of the learner changes."""
    shape = (3, size, size)
    batch_size = min(images, learner.train.batch_size)
    noise = torch.randint(0, 256, (BATCHES * batch_size, *shape), generator=torch.Generator(), dtype=torch.uint8)
    backbone = copy.deepcopy(learner.network.backbone)
    with torch.no_grad():
        held, features = _activations(backbone.eval(), learner.network.pixels(noise[:2]))
    with seeded(learner.network.device, 0):
        model = Classifier(
            backbone, nn.Linear(features, classes * learner.rotations.num_rotations, device=learner.network.device)
        )
    warm = WARM_CALLS if learner.network.device.type == "cuda" else 1  # epochs, until steps are captured
    ends: list[float] = []

    def note_time(epoch: Epoch) -> None:
        ends.append(time.monotonic())

    Trainer(learner.fabric).fit(
        model,
        TensorExamples(noise, torch.arange(len(noise)) % classes),
        replace(learner.train, epochs=warm + 1, batch_size=batch_size),
        seed=(0,),
        show=BatchTransform(learner.network.prepare, learner.augment, learner.rotations),
        after_epoch=note_time,
    )
    each = (ends[-1] - ends[-2]) / len(noise)
    passes = learner.train.epochs + learner.rounds * learner.retrain.epochs
    passes += PRUNING * learner.rounds * min(1.0, learner.prune_images / images)
    views = len(views_of(learner.rotations.num_rotations, learner.rotations.flips))
    passes += LOOKING * (1 + len(learner.network.subnetworks)) * views
    weights = 4 * sum(parameter.numel() for parameter in backbone.parameters())
    pixels = 3 * size * size
    memory = 8 * weights + batch_size * (2 * held + 4 * pixels) + 2 * images * pixels
    return Estimate(each * images * passes, memory)


def _activations(backbone: nn.Module, pixels: Tensor) -> tuple[int, int]:
    """Return the bytes that one image leaves in the layers of a backbone, and the number of features."""
    sizes: list[int] = []

    def note_size(_module: nn.Module, _inputs: object, output: object) -> None:
        if isinstance(output, Tensor):
            sizes.append(output.nbytes // len(pixels))

    hooks = [m.register_forward_hook(note_size) for m in backbone.modules() if not list(m.children())]
    features = backbone(pixels).shape[1]
    for hook in hooks:
        hook.remove()
    return sum(sizes), features
