"""Unlearning: remove a task so that nothing that only it had is left.

Weights that other tasks also use stay as they are, to the bit. All other weights become free and get new values: free
weights still hold what training left in them, so even those that the task never owned may carry information about it.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from cps.network.architectures import Architecture
from cps.network.partition import named_tensors
from cps.network.shared import SharedNetwork
from cps.runtime.seeding import derive_seed, generator
from cps.selection.base import LinkedSelector, Selector, Statistics
from cps.selection.rejection import REJECTION_KEY


def forget_task(network: SharedNetwork, task: int, fresh: Mapping[str, Tensor], selectors: Sequence[Selector]) -> None:
    """Remove a task's subnetwork; every weight that is then free gets its value from `fresh`.

    Later tasks move down by one. A `LinkedSelector` removes the task from its statistics of other tasks. Statistics of
    selectors that are not in `selectors` may depend on the task too, so they are dropped.
    """
    with network.transaction():
        network.remove(task, fresh, _remaining_statistics(network, task, {each.name: each for each in selectors}))


def fresh_weights(network: SharedNetwork, backbone: nn.Module | Architecture | None, *key: int) -> dict[str, Tensor]:
    """Return values for the shared weights that depend on no task.

    They come from the given backbone, else they are the weights that the backbone came with, if these were kept, else
    they come from a builtin one initialised by the key, or are drawn as PyTorch initialises a new layer.
    """
    if network.pretrained is not None and not isinstance(backbone, nn.Module):
        return network.pretrained
    if isinstance(backbone, Architecture):
        backbone = backbone.make(derive_seed(*key))
    if backbone is not None:
        known = named_tensors(backbone)
        missing = [
            name for name, weight in network.weights.items() if known.get(name, weight[:0]).shape != weight.shape
        ]
        if missing:
            raise ValueError(
                f"fresh must have the network's weights, but '{missing[0]}' is missing or differs in shape"
            )
        return {name: known[name].detach() for name in network.weights}
    draw = generator(*key)
    values = {}
    for name, weight in network.weights.items():
        bound = weight[0].numel() ** -0.5
        values[name] = (2 * torch.rand(weight.shape, generator=draw, dtype=weight.dtype) - 1) * bound
    return values


def _remaining_statistics(
    network: SharedNetwork, task: int, selectors: Mapping[str, Selector]
) -> list[dict[str, Statistics]]:
    """Return the statistics of the other tasks, independent of `task`."""
    others = [subnetwork for index, subnetwork in enumerate(network.subnetworks) if index != task]
    remaining: list[dict[str, Statistics]] = [{} for _ in others]
    for name in sorted({name for subnetwork in others for name in subnetwork.statistics}):
        if name != REJECTION_KEY and name not in selectors:
            continue
        kept = [subnetwork.statistics.get(name) for subnetwork in others]
        selector = selectors.get(name)
        if isinstance(selector, LinkedSelector):
            kept = selector.without_task(network.statistics(name), task)
            if len(kept) != len(others):
                raise ValueError(f"{name}.without_task must return statistics of {len(others)} tasks, got {len(kept)}")
        for statistics, known in zip(remaining, kept, strict=True):
            if known is not None:
                statistics[name] = known
    return remaining
