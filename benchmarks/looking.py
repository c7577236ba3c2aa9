"""What it costs to look at one image eight times, in four turns and mirrored, as models for single images do.

Five subnetworks of a whole ResNet-18; each uses a third of all kernels, so that hardly a channel of it is dead. Masks,
weights and norms are random, which changes no time.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import cps
from benchmarks.selecting import add_subnetwork, evidence_of
from benchmarks.timing import compare, row
from cps.data.rotations import views_of
from cps.experiments.recipes import SURE
from cps.network.shared import SharedNetwork

if TYPE_CHECKING:
    from lightning_fabric import Fabric

TASKS, CLASSES, ON = 5, 10, 1 / 3


def looking(fabric: "Fabric") -> list[dict[str, Any]]:
    """Compare eight looks at an image with eight passes, with two looks (upright, mirrored), and with one."""
    device = fabric.device
    image, pairs = torch.rand(1, 3, 32, 32), 5 if device.type == "cpu" else 30
    eight = partial(evidence_of, _network(device, num_rotations=4, flips=True), image)
    two = partial(evidence_of, _network(device, num_rotations=1, flips=True), image)
    upright = partial(evidence_of, _network(device, num_rotations=1, flips=False))
    others: dict[str, tuple[Callable[[], None], float | None]] = {
        "look by look": (partial(_look_by_look, upright, image), 1.0),
        "two looks": (two, None),
        "one": (partial(upright, image), None),
    }
    return [
        row(f"{TASKS} subnetworks look at one image eight times, against {name}",
            *compare(eight, other, device, pairs=pairs), limit)
        for name, (other, limit) in others.items()
    ]  # fmt: skip


def choosing(fabric: "Fabric") -> list[dict[str, Any]]:
    """Compare whole predictions of one image: by the cascade and the largest output, in eight looks and in two."""
    image, pairs = torch.rand(1, 3, 32, 32), 10 if fabric.device.type == "cpu" else 30
    eight, two = (_learned(fabric, each) for each in (cps.Rotations(flips=True), cps.Upright(flips=True)))
    cascade = partial(eight.predict, image)
    rows = {
        "by the cascade, against by the largest output": (partial(eight.predict, image, selector=cps.MaxOutput()), 1.5),
        "in eight looks, against in two": (partial(two.predict, image), None),
    }
    return [
        row(f"one image of {TASKS} tasks {what}", *compare(cascade, other, fabric.device, pairs=pairs), limit)
        for what, (other, limit) in rows.items()
    ]


def _learned(fabric: "Fabric", rotations: cps.RotationScheme) -> cps.Learner:
    """Return a learner of some tasks of noise; what it has learned changes no time."""
    training = cps.Training(1, cps.SGD(0.01), batch_size=32)
    learner = cps.Learner(
        cps.resnet18(3), pruner=cps.Magnitude(ON), rounds=1, train=training, retrain=training, rotations=rotations,
        selectors=(SURE, cps.MaxOutput()), fabric=fabric,
    )  # fmt: skip
    for task in range(TASKS):
        classes = range(CLASSES * task, CLASSES * task + CLASSES)
        learner.learn(cps.Task(classes, (torch.rand(20, 3, 32, 32), [*classes] * 2)))
    return learner


def _network(device: torch.device, *, num_rotations: int, flips: bool) -> SharedNetwork:
    torch.manual_seed(0)
    network = SharedNetwork(cps.resnet18(3))
    for _ in range(TASKS):
        masks = {name: torch.rand(taken.shape) < ON for name, taken in network.taken.items()}
        add_subnetwork(network, masks, CLASSES, num_rotations=num_rotations, flips=flips)
    network.to(device)
    return network


def _look_by_look(work: Callable[[Tensor], None], image: Tensor) -> None:
    for look in views_of(4, flips=True):
        work(look(image))
