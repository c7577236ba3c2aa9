"""Guards: what training must not move, put back after every optimizer step.

Weight decay and momentum move weights whose gradient is zero, so masking gradients is not enough.
"""

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from cps.network.mask_scores import move_scores
from cps.network.masks import mask_shape


class Kept(NamedTuple):
    """What may not move of one weight: `taken` entries keep the `sealed` values, `off` entries are zero.

    Where there are `scores`, taken entries are zero while their score is not positive, and training may move those.
    """

    taken: Tensor
    sealed: Tensor
    off: Tensor
    scores: Tensor | None = None


Guard = Mapping[str, Kept]


def bind(guard: Guard, parameters: Mapping[str, Tensor]) -> Callable[..., None]:
    """Return a function that puts back what the guard keeps of these parameters; scores move by a pace it is given."""
    live = {name: parameters[name].detach() for name in guard}
    taken = [(live[name], kept) for name, kept in guard.items() if kept.taken.any()]
    pruned = [(live[name], kept) for name, kept in guard.items() if kept.off.any()]
    chosen = [(parameters[name], kept, kept.scores) for name, kept in guard.items() if kept.scores is not None]

    @torch.no_grad()
    def protect(pace: float = 0.0) -> None:
        for weight, kept, scores in chosen:
            if weight.grad is not None:
                move_scores(scores, weight.grad, kept.sealed, kept.taken & ~kept.off, pace)
        for weight, kept in taken:
            torch.where(kept.taken, kept.sealed, weight, out=weight)
        for weight, kept in pruned:
            weight.masked_fill_(kept.off, 0.0)
        for weight, kept, scores in chosen:
            weight.detach().masked_fill_(kept.taken & (scores <= 0), 0.0)

    return protect


class FlatRestorer:
    """Does the same for many weights that lie in one vector, in one operation; what it keeps may change.

    `views` are the weights in that vector. One may be larger than what is guarded of it (see padding.py); what lies
    beyond is zero and stays zero. `choosing` are the names of those that may have scores. What is kept becomes `value`
    where it is not `free`, one or zero.
    """

    def __init__(self, vector: Tensor, views: Callable[[Tensor], Mapping[str, Tensor]], choosing: Collection[str] = ()):
        self._vector, self._views = vector.detach(), views
        self.free, self.value = torch.ones_like(self._vector), torch.zeros_like(self._vector)
        self._guard: Guard = {}
        self._choices: dict[str, _Choice] = {}
        if choosing:
            assert vector.grad is not None
            gradient, value = views(vector.grad), views(self.value)
            self._choices = {name: _Choice(gradient[name], value[name]) for name in choosing if name in value}

    @torch.no_grad()
    def keep(self, guard: Guard, shapes: Mapping[str, torch.Size]) -> None:
        """Keep from now on what this guard says; `shapes` are those of the weights where they are larger here."""
        self._guard = guard
        self.free.fill_(1.0)
        self.value.zero_()
        free, value = self._views(self.free), self._views(self.value)
        for name in shapes.keys() & free.keys():
            free[name].zero_()
            free[name][tuple(map(slice, shapes[name]))] = 1.0
        for name in guard.keys() & free.keys():
            kept = guard[name]
            within = tuple(map(slice, kept.sealed.shape))
            free[name].zero_()
            free[name][within] = (~(kept.taken | kept.off)).to(kept.sealed.dtype).expand(kept.sealed.shape)
            value[name][within] = torch.where(kept.taken & ~kept.off, kept.sealed, 0.0)
        for name, choice in self._choices.items():
            choice.keep(guard.get(name))

    @torch.no_grad()
    def __call__(self, pace: float | Tensor = 0.0) -> None:
        """Put back what is kept; scores move by a pace."""
        self.move(pace)
        self._vector.mul_(self.free).add_(self.value)

    @torch.no_grad()
    def move(self, pace: float | Tensor) -> None:
        """Move the scores, and what is kept by them."""
        for choice in self._choices.values():
            choice.move(pace)

    @torch.no_grad()
    def settle(self) -> None:
        """Bring the scores of the guard up to date."""
        for name, choice in self._choices.items():
            scores = self._guard[name].scores if name in self._guard else None
            if scores is not None:
                scores.copy_(choice.scores[tuple(map(slice, scores.shape))])


class _Choice:
    """The scores of one weight in a vector, of whose `value` they switch entries on and off."""

    def __init__(self, gradient: Tensor, value: Tensor):
        self.gradient, self.value = gradient, value
        self.sealed = torch.zeros_like(value)
        self.scores = value.new_ones(mask_shape(value.shape))
        self.usable = torch.zeros_like(self.scores)

    def keep(self, kept: Kept | None) -> None:
        """Take up the scores there are, in memory that stays where it is."""
        self.sealed.copy_(self.value)
        self.scores.fill_(1.0)
        self.usable.zero_()
        if kept is not None and kept.scores is not None:
            within = tuple(map(slice, kept.scores.shape))
            self.scores[within] = kept.scores.to(self.scores.dtype)
            self.usable[within] = (kept.taken & ~kept.off).to(self.scores.dtype)

    def move(self, pace: float | Tensor) -> None:
        """Move the scores, and switch entries by them."""
        move_scores(self.scores, self.gradient, self.sealed, self.usable, pace)
        self.value.copy_(torch.where(self.scores > 0, self.sealed, 0.0))
