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
    """Return a function that puts back what the guard keeps of these parameters."""
    live = {name: parameters[name].detach() for name in guard}
    taken = [(live[name], kept) for name, kept in guard.items() if kept.taken.any()]
    pruned = [(live[name], kept) for name, kept in guard.items() if kept.off.any()]

    @torch.no_grad()
    def protect() -> None:
        for weight, kept in taken:
            torch.where(kept.taken, kept.sealed, weight, out=weight)
        for weight, kept in pruned:
            weight.masked_fill_(kept.off, 0.0)

    return protect


class Restorer:
    """Does the same for all weights at once, at the price of two copies of them; what it keeps may change.

    A parameter may be larger than its weight (see padding.py); what lies beyond is zero and stays zero.
    """

    def __init__(self, parameters: Mapping[str, Tensor]):
        self._weights = {name: value.detach() for name, value in parameters.items() if value.ndim > 1}
        self._free = {name: torch.ones_like(weight) for name, weight in self._weights.items()}
        self._value = {name: torch.zeros_like(weight) for name, weight in self._weights.items()}

    @torch.no_grad()
    def keep(self, guard: Guard) -> None:
        """Keep from now on what this guard says."""
        for name in self._weights:
            self._free[name].fill_(1.0)
            self._value[name].zero_()
        for name, kept in guard.items():
            within = tuple(map(slice, kept.sealed.shape))
            self._free[name].zero_()
            self._free[name][within] = (~(kept.taken | kept.off)).to(kept.sealed.dtype).expand(kept.sealed.shape)
            self._value[name][within] = torch.where(kept.taken & ~kept.off, kept.sealed, 0.0)

    @torch.no_grad()
    def __call__(self) -> None:
        """Put back what is kept."""
        weights = list(self._weights.values())
        torch._foreach_mul_(weights, list(self._free.values()))  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_add_(weights, list(self._value.values()))  # pyright: ignore[reportPrivateImportUsage]
