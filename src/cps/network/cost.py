"""Measure the cost of extracted subnetworks and of the dense network: parameters, operations and time."""

import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from cps.network.compact.extraction import Standalone, copy_with_tensors
from cps.network.shared import SharedNetwork


class Cost(NamedTuple):
    """The number of parameters, and the floating point operations and milliseconds for one image."""

    parameters: int
    operations: int
    milliseconds: float


def measure_costs(network: SharedNetwork) -> tuple[Cost, list[Cost]]:
    """Return the cost per image of the dense network with a head, and of each extracted subnetwork."""
    first = network.subnetworks[0]
    backbone = network.with_trunk(copy_with_tensors(network.backbone, network.tensors_of(0)))
    dense = Standalone(backbone, first, network.prepare)
    return measure_cost(dense, network), [
        measure_cost(network.extract(task), network) for task in range(len(network.subnetworks))
    ]


@torch.no_grad()
def measure_cost(module: nn.Module, network: SharedNetwork) -> Cost:
    """Return the cost of a module that takes the network's images."""
    image = torch.zeros(1, *(network.input_shape or ()), device=network.device)
    with FlopCounterMode(display=False) as counter:
        module(image)
    return Cost(
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        operations=counter.get_total_flops(),
        milliseconds=1000 * median(measure_seconds(lambda: module(image), image.device) for _ in range(10)),
    )


def measure_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return how long a function takes, including the work it queues on a GPU."""
    _synchronize(device)
    start = time.perf_counter()
    work()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
