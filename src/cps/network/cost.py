"""What a subnetwork costs on its own, beside the dense network: parameters, operations and time."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from cps.network.compact.extraction import Standalone, copy_with_tensors
from cps.network.shared import SharedNetwork


def describe_costs(network: SharedNetwork) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the cost for one image of the dense network with a head, and of each extracted subnetwork."""
    first = network.subnetworks[0]
    dense = Standalone(copy_with_tensors(network.backbone, network.tensors_of(0)), first, network.prepare)
    return cost_of(dense, network), [
        cost_of(network.extract(task), network) for task in range(len(network.subnetworks))
    ]


@torch.no_grad()
def cost_of(module: nn.Module, network: SharedNetwork) -> dict[str, Any]:
    """Return parameters, floating point operations and the milliseconds that one image takes."""
    image = torch.zeros(1, *(network.input_shape or ()), device=network.device)
    with FlopCounterMode(display=False) as counter:
        module(image)
    return {
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "operations": counter.get_total_flops(),
        "milliseconds": 1000 * median(seconds_of(lambda: module(image), image.device) for _ in range(10)),
    }


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Return how long some work takes, what it leaves to a GPU included."""
    _wait(device)
    began = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
