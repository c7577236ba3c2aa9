"""Forgetting on purpose: a task is dropped, and nothing that only it had is left behind.

The weights that other tasks use too stay as they are, to the bit. All others are free again and drawn anew: free
weights still hold what training left in them, so those that the task never owned may remember it as well.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from cps.network.backbones import Builtin
from cps.network.masks import union_of
from cps.network.partition import copy_like, named_tensors, set_tensors
from cps.network.shared import SharedNetwork
from cps.network.subnetwork import Subnetwork
from cps.network.transaction import transaction
from cps.runtime.seeding import derived_seed, generator
from cps.selection.base import LinkedSelector, Statistics
from cps.selection.rejection import NAME as FAMILIARITY


@torch.no_grad()
def forget_task(network: SharedNetwork, task: int, fresh: Mapping[str, Tensor], selectors: Sequence[Any]) -> None:
    """Drop a subnetwork; every weight that is free then takes its value from `fresh`. Later tasks move down by one.

    A `LinkedSelector` takes it out of its numbers about other tasks. Numbers of selectors that are not at hand may know
    of it too, so they go.
    """
    with transaction(network):
        frozen = _frozen(network)
        network.subnetworks = _others(network, task, {selector.name: selector for selector in selectors})
        taken = union_of((subnetwork.masks for subnetwork in network.subnetworks), network.weights)
        network.taken = {name: torch.ones_like(mask) if name in frozen else mask for name, mask in taken.items()}
        for name, weight in network.weights.items():
            free = torch.where(network.taken[name], weight, fresh[name].to(weight))
            network.weights[name] = copy_like(weight, free)
        set_tensors(network.backbone, {**network.weights, **network.initial})  # it held the last draft
        network.clear_compact()


def fresh_weights(network: SharedNetwork, backbone: nn.Module | Builtin | None, *key: int) -> dict[str, Tensor]:
    """Return values for the shared weights that know of no task.

    They are those of a backbone, or of a builtin one drawn by the key; else they are drawn as PyTorch draws those of
    a new layer.
    """
    if isinstance(backbone, Builtin):
        backbone = backbone.drawn(derived_seed(*key))
    if backbone is not None:
        known = named_tensors(backbone)
        missing = [
            name for name, weight in network.weights.items() if known.get(name, weight[:0]).shape != weight.shape
        ]
        if missing:
            raise ValueError(f"the fresh backbone has no weight '{missing[0]}' of the shape that this network has")
        return {name: known[name].detach() for name in network.weights}
    draws = generator(*key)
    drawn = {}
    for name, weight in network.weights.items():
        bound = weight[0].numel() ** -0.5
        drawn[name] = (2 * torch.rand(weight.shape, generator=draws, dtype=weight.dtype) - 1) * bound
    return drawn


def _others(network: SharedNetwork, task: int, selectors: Mapping[str, Any]) -> list[Subnetwork]:
    """Return the other subnetworks, with such numbers about them as know nothing of the task."""
    others = [subnetwork for index, subnetwork in enumerate(network.subnetworks) if index != task]
    kept: list[dict[str, Statistics]] = [{} for _ in others]
    for name in sorted({name for subnetwork in others for name in subnetwork.statistics}):
        numbers = [subnetwork.statistics.get(name) for subnetwork in others]
        if name != FAMILIARITY and name not in selectors:
            continue
        selector = selectors.get(name)
        if isinstance(selector, LinkedSelector):
            numbers = selector.without(network.statistics(name), task)
            if len(numbers) != len(others):
                raise ValueError(f"{name}.without must return numbers about {len(others)} tasks, got {len(numbers)}")
        for statistics, known in zip(kept, numbers, strict=True):
            if known is not None:
                statistics[name] = known
    return [replace(subnetwork, statistics=statistics) for subnetwork, statistics in zip(others, kept, strict=True)]


def _frozen(network: SharedNetwork) -> set[str]:
    """Return the weights that the user froze: they are taken whole, whoever uses them."""
    used = union_of((subnetwork.masks for subnetwork in network.subnetworks), network.weights)
    live = named_tensors(network.backbone)
    return {
        name for name in network.weights if not live[name].requires_grad or (network.taken[name] & ~used[name]).any()
    }
