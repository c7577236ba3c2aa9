"""Guards: what training must not move, put back after every optimizer step.

Weight decay and momentum move weights whose gradient is zero, so masking gradients is not enough.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class Kept(NamedTuple):
    """What may not move of one weight: `taken` entries keep the `sealed` values, `off` entries are zero."""

    taken: Tensor
    sealed: Tensor
    off: Tensor


Guard = Mapping[str, Kept]


def bind(guard: Guard, parameters: Mapping[str, Tensor]) -> Callable[[], None]:
    """Return a function that puts back what the guard keeps of these parameters.

    A parameter may be larger than its weight (see padding.py); what lies beyond is zero and stays zero.
    """
    live = {name: parameters[name].detach() for name in guard}
    if any(weight.is_cuda for weight in live.values()):
        return _bind_at_once(guard, live)
    taken = [(live[name], kept) for name, kept in guard.items() if kept.taken.any()]
    pruned = [(live[name], kept) for name, kept in guard.items() if kept.off.any()]

    @torch.no_grad()
    def protect() -> None:
        for weight, kept in taken:
            torch.where(kept.taken, kept.sealed, weight, out=weight)
        for weight, kept in pruned:
            weight.masked_fill_(kept.off, 0.0)

    return protect


def _bind_at_once(guard: Guard, live: Mapping[str, Tensor]) -> Callable[[], None]:
    """Return the same for a GPU: two kernels for all weights together, at the price of two copies of them."""
    weights, free, value = [], [], []
    for name, kept in guard.items():
        if not (kept.taken | kept.off).any():
            continue
        within = tuple(map(slice, kept.sealed.shape))
        weights.append(live[name])
        free.append(torch.zeros_like(live[name]))
        free[-1][within] = (~(kept.taken | kept.off)).to(free[-1].dtype).expand(kept.sealed.shape)
        value.append(torch.zeros_like(live[name]))
        value[-1][within] = torch.where(kept.taken & ~kept.off, kept.sealed, 0.0)

    @torch.no_grad()
    def protect() -> None:
        if weights:
            torch._foreach_mul_(weights, free)  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_add_(weights, value)  # pyright: ignore[reportPrivateImportUsage]

    return protect
