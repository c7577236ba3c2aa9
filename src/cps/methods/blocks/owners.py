"""Owners: the task that each weight belongs to, 0 for a free weight and `t + 1` for one of task t."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cps.network.masks import Masks


def find_owners(masks: Sequence[Masks]) -> dict[str, Tensor]:
    """Return the owner of each weight: the first task whose mask has it."""
    owners = {name: torch.zeros_like(mask, dtype=torch.uint8) for name, mask in (masks[0] if masks else {}).items()}
    for task in reversed(range(len(masks))):
        for name, mask in masks[task].items():
            owners[name][mask] = task + 1
    return owners


def masks_of(owners: Mapping[str, Tensor], task: int) -> Masks:
    """Return the weights that belong to a task or an earlier one."""
    return {name: (owner > 0) & (owner <= task + 1) for name, owner in owners.items()}


def owner_bytes(owners: Mapping[str, Tensor], tasks: int) -> int:
    """Return the bytes of the owners, each in as many bits as `tasks` tasks need."""
    return sum((owner.numel() * tasks.bit_length() + 7) // 8 for owner in owners.values())


def smallest_weights(weight: Tensor, among: Tensor, share: float) -> Tensor:
    """Return the share of the weights in `among` with the smallest absolute values: those up to the k-th smallest.

    So of weights of equal size at the limit, all are in it (PackNet).
    """
    size = weight.detach().abs()
    number = round(share * int(among.sum()))
    if number == 0:
        return torch.zeros_like(among)
    return among & (size <= size[among].kthvalue(number).values)
