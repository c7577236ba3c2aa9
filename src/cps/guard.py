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
    """Does the same for many weights that lie in one vector, in one operation; what it keeps may change.

    `views` are the weights in that vector. One may be larger than what is guarded of it (see padding.py); what lies
    beyond is zero and stays zero.
    """

    def __init__(self, vector: Tensor, views: Callable[[Tensor], Mapping[str, Tensor]]):
        self._vector, self._views = vector.detach(), views
        self._free, self._value = torch.ones_like(self._vector), torch.zeros_like(self._vector)

    @torch.no_grad()
    def keep(self, guard: Guard, shapes: Mapping[str, torch.Size]) -> None:
        """Keep from now on what this guard says; `shapes` are those of the weights where they are larger here."""
        self._free.fill_(1.0)
        self._value.zero_()
        free, value = self._views(self._free), self._views(self._value)
        for name in shapes.keys() & free.keys():
            free[name].zero_()
            free[name][tuple(map(slice, shapes[name]))] = 1.0
        for name in guard.keys() & free.keys():
            kept = guard[name]
            within = tuple(map(slice, kept.sealed.shape))
            free[name].zero_()
            free[name][within] = (~(kept.taken | kept.off)).to(kept.sealed.dtype).expand(kept.sealed.shape)
            value[name][within] = torch.where(kept.taken & ~kept.off, kept.sealed, 0.0)

    @torch.no_grad()
    def __call__(self) -> None:
        """Put back what is kept."""
        self._vector.mul_(self._free).add_(self._value)
