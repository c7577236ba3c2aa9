"""Masks: which connections of the shared weights belong to a subnetwork.

A mask is a bool tensor that broadcasts to its weight: one entry per weight of a `Linear` layer, shape
(out, in), and one per kernel of a `Conv2d` layer, shape (out, in, 1, 1).
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

Masks = dict[str, Tensor]


def mask_shape(weight_shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the mask over a weight: kernels are switched on and off whole."""
    return (*weight_shape[:2], *(1 for _ in weight_shape[2:]))


def full_masks(weights: Mapping[str, Tensor], *, on: bool) -> Masks:
    """Return masks over `weights` with every connection on, or every connection off."""
    return {
        name: torch.full(mask_shape(weight.shape), on, dtype=torch.bool, device=weight.device)
        for name, weight in weights.items()
    }


def union(first: Masks, second: Masks) -> Masks:
    """Return the connections that are in either."""
    return {name: first[name] | second[name] for name in first}


def is_subset(smaller: Masks, larger: Masks) -> bool:
    """Say whether every connection of `smaller` is in `larger`."""
    return all(bool((~mask | larger[name]).all()) for name, mask in smaller.items())


def share_on(masks: Masks, weights: Mapping[str, Tensor]) -> float:
    """Return the share of all weights, from 0 to 1, that the masks switch on."""
    total = sum(weight.numel() for weight in weights.values())
    return sum(weights_on(mask, weights[name]) for name, mask in masks.items()) / total


def weights_on(mask: Tensor, weight: Tensor) -> int:
    """Return how many single weights the mask switches on."""
    return int(mask.sum()) * (weight.numel() // mask.numel())


def per_connection(values: Tensor) -> Tensor:
    """Return the sum of the values of each connection of a weight, in the shape of its mask."""
    summed = values.flatten(2).sum(dim=2) if values.ndim > 2 else values
    return summed.reshape(mask_shape(values.shape))


def per_output(outputs: Tensor, ndim: int) -> Tensor:
    """Shape one bool per output of a layer so that it broadcasts to a mask or weight of so many axes."""
    return outputs.reshape(-1, *(1 for _ in range(ndim - 1)))


def times_used(masks: Sequence[Masks], name: str) -> Tensor:
    """Return, for each connection of one weight, how many of the masks use it."""
    return torch.stack([mask[name] for mask in masks]).sum(dim=0)


def pack(mask: Tensor) -> Tensor:
    """Pack a mask into bytes, eight connections to a byte."""
    return torch.from_numpy(np.packbits(mask.detach().cpu().numpy().reshape(-1)))


def unpack(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the mask of that shape that `pack` made bytes of."""
    bits = np.unpackbits(packed.cpu().numpy(), count=int(np.prod(shape)))
    return torch.from_numpy(bits.astype(bool)).reshape(*shape)
