"""Masks: which connections of the shared weights belong to a subnetwork.

A mask is a bool tensor that broadcasts to its weight: one entry per weight of a `Linear` layer, shape
(out, in), and one per kernel of a `Conv2d` layer, shape (out, in, 1, 1). Networks of methods that mask every weight
alone have masks of the shape of the weight (`single_weights`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce

import numpy as np
import torch
from torch import Tensor

Masks = dict[str, Tensor]
MaskShape = Callable[[Sequence[int]], tuple[int, ...]]  # the shape of a weight -> that of its masks
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers of the same size, by bytes


def mask_shape(weight_shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the mask over a weight: a convolution kernel is on or off as a whole."""
    return (*weight_shape[:2], *(1 for _ in weight_shape[2:]))


def single_weights(weight_shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the mask over a weight of which every single number is on or off."""
    return tuple(weight_shape)


def full_masks(weights: Mapping[str, Tensor], *, on: bool, shape: MaskShape = mask_shape) -> Masks:
    """Return masks over `weights` with every connection on, or every connection off."""
    return {
        name: torch.full(shape(weight.shape), on, dtype=torch.bool, device=weight.device)
        for name, weight in weights.items()
    }


def masks_like(masks: Masks, *, on: bool) -> Masks:
    """Return masks of the same shapes with every connection on, or every connection off."""
    return {name: torch.full_like(mask, on) for name, mask in masks.items()}


def masked(weight: Tensor, mask: Tensor) -> Tensor:
    """Return a weight with zeros where its mask is off, in the same memory layout.

    Another layout would select other kernels, which round differently. The bits are multiplied as integers, since
    -1.0 * 0 is a negative zero, whose sign a later task could change.
    """
    bits = weight.view(BITS[weight.element_size()])
    return torch.mul(bits, mask, out=torch.empty_like(bits)).view(weight.dtype)


def union(first: Masks, second: Masks) -> Masks:
    """Return the connections that are in either mask."""
    return {name: first[name] | second[name] for name in first}


def union_of(every: Iterable[Masks], like: Masks) -> Masks:
    """Return the connections that are in any of the masks, which have the shapes of `like`."""
    return reduce(union, every, masks_like(like, on=False))


def topk_mask(weight: Tensor, among: Tensor, number: int) -> Tensor:
    """Return the mask of the `number` connections with the largest absolute weight among those in `among`."""
    size = per_connection(weight.detach().abs()).masked_fill(~among, -1.0)
    stays = torch.zeros_like(among).flatten()
    stays[size.flatten().topk(number).indices] = True
    return stays.reshape(among.shape) & among


def is_subset(smaller: Masks, larger: Masks) -> bool:
    """Return True if every connection of `smaller` is in `larger`."""
    return all(bool((~mask | larger[name]).all()) for name, mask in smaller.items())


def check_pruned(masks: Masks, before: Masks) -> Masks:
    """Return a pruner's masks on the device of `before`; raise `ValueError` unless each is a bool subset of it."""
    if set(masks) != set(before):
        raise ValueError("a pruner must return a mask for every weight it was given")
    for name, mask in before.items():
        own = masks[name]
        if not isinstance(own, Tensor) or own.shape != mask.shape or own.dtype != torch.bool:
            raise ValueError(f"a pruner must return a bool mask of shape {tuple(mask.shape)} for '{name}'")
    found = {name: masks[name].to(mask.device) for name, mask in before.items()}
    if not is_subset(found, before):
        raise ValueError("a pruner may only switch connections off, but some came back on")
    return found


def find_changed(before: Mapping[str, Tensor], after: Mapping[str, Tensor], masks: Masks) -> str | None:
    """Return the name of the first weight whose value differs where its mask is on, or None."""
    for name, value in after.items():
        if not torch.equal(masked(before[name], masks[name]), masked(value, masks[name])):
            return name
    return None


def density(masks: Masks, weights: Mapping[str, Tensor]) -> float:
    """Return the share of all weights, from 0 to 1, that the masks switch on."""
    total = sum(weight.numel() for weight in weights.values())
    return sum(count_weights(mask, weights[name]) for name, mask in masks.items()) / total


def count_weights(mask: Tensor, weight: Tensor) -> int:
    """Return how many single weights the mask switches on."""
    return int(mask.sum()) * (weight.numel() // mask.numel())


def per_connection(values: Tensor) -> Tensor:
    """Return the sum of the values of each connection of a weight, in the shape of its mask."""
    summed = values.flatten(2).sum(dim=2) if values.ndim > 2 else values
    return summed.reshape(mask_shape(values.shape))


def per_output(outputs: Tensor, ndim: int) -> Tensor:
    """Reshape one bool per output of a layer so that it broadcasts to a mask or weight with `ndim` axes."""
    return outputs.reshape(-1, *(1 for _ in range(ndim - 1)))


def count_users(masks: Sequence[Masks], name: str) -> Tensor:
    """Return how many of the masks use each connection of one weight."""
    return torch.stack([mask[name] for mask in masks]).sum(dim=0)


def pack(mask: Tensor) -> Tensor:
    """Pack a mask into bytes, eight connections to a byte."""
    return torch.from_numpy(np.packbits(mask.detach().cpu().numpy().reshape(-1)))


def unpack(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the mask of this shape from the bytes that `pack` returned."""
    bits = np.unpackbits(packed.cpu().numpy(), count=int(np.prod(shape)))
    return torch.from_numpy(bits.astype(bool)).reshape(*shape)
