"""The cost of eight views of an image (four rotations and their mirror images), as models for single images use.

Five subnetworks of a ResNet-18; each uses a third of all kernels, so that hardly any channel is dead. Masks, weights
and norms are random, which does not change the time.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import cps
from benchmarks.prediction import add_subnetwork, run_all
from benchmarks.timing import compare, time_row
from cps.data.rotations import make_views
from cps.experiments.recipes import SINGLE_IMAGE_CASCADE
from cps.network.shared import SharedNetwork

if TYPE_CHECKING:
    from lightning_fabric import Fabric

TASKS, CLASSES, DENSITY = 5, 10, 1 / 3


def benchmark_views(fabric: "Fabric") -> list[dict[str, Any]]:
    """Compare eight views at once with one at a time, with two views (upright and mirrored), and with one."""
    device = fabric.device
    image, pairs = torch.rand(1, 3, 32, 32), 5 if device.type == "cpu" else 30
    eight = partial(run_all, _make_network(device, num_rotations=4, flips=True), image)
    two = partial(run_all, _make_network(device, num_rotations=1, flips=True), image)
    upright = partial(run_all, _make_network(device, num_rotations=1, flips=False))
    others: dict[str, tuple[Callable[[], None], float | None]] = {
        "one view at a time": (partial(_run_each_view, upright, image), 1.0),
        "2 views": (two, None),
        "1 view": (partial(upright, image), None),
    }
    return [
        time_row(f"{TASKS} subnetworks, 8 views of one image, against {name}",
            *compare(eight, other, device, pairs=pairs), limit)
        for name, (other, limit) in others.items()
    ]  # fmt: skip


def benchmark_selectors(fabric: "Fabric") -> list[dict[str, Any]]:
    """Compare whole predictions of one image: the cascade with the largest output, and eight views with two."""
    image, pairs = torch.rand(1, 3, 32, 32), 10 if fabric.device.type == "cpu" else 30
    eight, two = (_make_learner(fabric, each) for each in (cps.Rotations(flips=True), cps.Upright(flips=True)))
    cascade = partial(eight.predict, image)
    rows = {
        "cascade against largest output": (partial(eight.predict, image, selector=cps.MaxOutput()), 1.5),
        "8 views against 2": (partial(two.predict, image), None),
    }
    return [
        time_row(
            f"prediction of one image, {TASKS} tasks, {label}",
            *compare(cascade, other, fabric.device, pairs=pairs),
            limit,
        )
        for label, (other, limit) in rows.items()
    ]


def _make_learner(fabric: "Fabric", rotations: cps.RotationScheme) -> cps.Learner:
    """Return a learner of some tasks of noise; what it has learned does not change the time."""
    training = cps.Training(1, cps.SGD(0.01), batch_size=32)
    learner = cps.Learner(
        cps.resnet18(3), pruner=cps.Magnitude(DENSITY), rounds=1, train=training, retrain=training, rotations=rotations,
        selectors=(SINGLE_IMAGE_CASCADE, cps.MaxOutput()), fabric=fabric,
    )  # fmt: skip
    for task in range(TASKS):
        classes = range(CLASSES * task, CLASSES * task + CLASSES)
        learner.learn(cps.Task(classes, (torch.rand(20, 3, 32, 32), [*classes] * 2)))
    return learner


def _make_network(device: torch.device, *, num_rotations: int, flips: bool) -> SharedNetwork:
    torch.manual_seed(0)
    network = SharedNetwork(cps.resnet18(3))
    for _ in range(TASKS):
        masks = {name: torch.rand(taken.shape) < DENSITY for name, taken in network.taken.items()}
        add_subnetwork(network, masks, CLASSES, num_rotations=num_rotations, flips=flips)
    network.to(device)
    return network


def _run_each_view(run: Callable[[Tensor], None], image: Tensor) -> None:
    for view in make_views(4, flips=True):
        run(view(image))
