"""What it costs to look at one image eight times, in four turns and mirrored, as models for single images do.

Five subnetworks of a whole ResNet-18; each uses a third of all kernels, so that hardly a channel of it is dead. Masks,
weights and norms are random, which changes no time.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import cps
from benchmarks.selecting import add_subnetwork, evidence_of
from benchmarks.timing import compare, row
from cps import views
from cps.network import SharedNetwork
from cps.recipes import SURE

if TYPE_CHECKING:
    from lightning_fabric import Fabric

TASKS, CLASSES, ON = 5, 10, 1 / 3


def looking(fabric: "Fabric") -> list[dict[str, Any]]:
    """Compare eight looks at an image with eight passes, with two looks (upright, mirrored), and with one."""
    device = fabric.device
    image, pairs = torch.rand(1, 3, 32, 32), 5 if device.type == "cpu" else 30
    eight = partial(evidence_of, _network(device, turns=4, mirrors=True), image)
    two = partial(evidence_of, _network(device, turns=1, mirrors=True), image)
    one = partial(evidence_of, _network(device, turns=1, mirrors=False), image)
    others = {"look by look": (partial(_look_by_look, eight), 1.0), "two looks": (two, None), "one": (one, None)}
    return [
        row(f"{TASKS} subnetworks look at one image eight times, against {name}",
            *compare(eight, other, device, pairs=pairs), limit)
        for name, (other, limit) in others.items()
    ]  # fmt: skip


def choosing(fabric: "Fabric") -> list[dict[str, Any]]:
    """Compare the prediction of one image by the cascade with that by the largest output."""
    training = cps.Training(1, cps.SGD(0.01), batch_size=32)
    selectors = (SURE, cps.MaxOutput())
    learner = cps.Learner(
        cps.resnet18(3), pruner=cps.Magnitude(ON), rounds=1, train=training, retrain=training, selectors=selectors,
        fabric=fabric,
    )  # fmt: skip
    draws = torch.Generator().manual_seed(0)
    for task in range(TASKS):
        classes = range(CLASSES * task, CLASSES * task + CLASSES)
        learner.learn(cps.Task(classes, (torch.rand(80, 3, 32, 32, generator=draws), [*classes] * 8)))
    image, pairs = torch.rand(1, 3, 32, 32, generator=draws), 10 if fabric.device.type == "cpu" else 30
    cascade, largest = (partial(learner.predict, image, selector=selector) for selector in selectors)
    what = f"one image of {TASKS} tasks by the cascade, against by the largest output"
    return [row(what, *compare(cascade, largest, fabric.device, pairs=pairs), 1.5)]


def _network(device: torch.device, *, turns: int, mirrors: bool) -> SharedNetwork:
    torch.manual_seed(0)
    network = SharedNetwork(cps.resnet18(3))
    for _ in range(TASKS):
        masks = {name: torch.rand(taken.shape) < ON for name, taken in network.taken.items()}
        add_subnetwork(network, masks, CLASSES, turns=turns, mirrors=mirrors)
    network.to(device)
    return network


def _look_by_look(work: Callable[[], None]) -> None:
    before, views.AT_ONCE = views.AT_ONCE, 1
    work()
    views.AT_ONCE = before
