"""Freezing: restore sealed and pruned weights after every optimizer step.

Weight decay and momentum move weights whose gradient is zero, so masking gradients is not enough.
"""

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cps.network.mask_scores import update_scores
from cps.network.masks import mask_shape
from cps.network.partition import copy_like, partition


def freeze_weights(backbone: nn.Module) -> None:
    """Freeze the weights that tasks share, so that a shared network takes them from the start."""
    weights = dict(backbone.named_parameters())
    for name in partition(backbone).shared:
        weights[name].requires_grad_(False)


class Protected(NamedTuple):
    """What training must not move of one weight: `taken` entries keep the `sealed` values, `off` entries stay zero.

    With `scores`, a taken entry is zero while its score is not positive, and training may change the scores.
    """

    taken: Tensor
    sealed: Tensor
    off: Tensor
    scores: Tensor | None = None


Guard = Mapping[str, Protected]


def make_restore(guard: Guard, parameters: Mapping[str, Tensor]) -> Callable[..., None]:
    """Return a function that restores the guarded entries of these parameters.

    Its argument is the step size of the mask scores. A restored weight is `free * weight + value`, where `free` is one
    or zero: one vectorised operation, where a CPU takes ten times as long to choose entries by a mask.
    """
    restored = [_Restored(parameters[name].detach(), kept) for name, kept in guard.items()]
    scored = [(parameters[name], kept, kept.scores) for name, kept in guard.items() if kept.scores is not None]

    @torch.no_grad()
    def restore(score_step: float = 0.0) -> None:
        for weight, kept, scores in scored:
            if weight.grad is not None:
                update_scores(scores, weight.grad, kept.sealed, kept.taken & ~kept.off, score_step)
        for each in restored:
            each.restore()
        for weight, kept, scores in scored:
            weight.detach().masked_fill_(kept.taken & (scores <= 0), 0.0)

    return restore


class _Restored:
    """A weight, and the two factors that restore it; a method may change its guard in place between epochs."""

    def __init__(self, weight: Tensor, kept: Protected):
        self.weight, self.kept = weight, kept
        self._read_guard()

    def _read_guard(self) -> None:
        kept, self._versions = self.kept, self._current_versions()
        self.free = self.value = None
        if kept.taken.any() or kept.off.any():
            self.free = _free_entries(kept).to(self.weight.dtype)
        if kept.taken.any():
            self.value = copy_like(self.weight, torch.where(kept.taken & ~kept.off, kept.sealed, 0.0))

    def _current_versions(self) -> tuple[int, ...]:
        return self.kept.taken._version, self.kept.sealed._version, self.kept.off._version

    def restore(self) -> None:
        """Give the entries that must not move their values."""
        if self._versions != self._current_versions():
            self._read_guard()
        if self.free is not None and self.value is not None:
            torch.addcmul(self.value, self.weight, self.free, out=self.weight)
        elif self.free is not None:
            self.weight.mul_(self.free)


def _free_entries(kept: Protected) -> Tensor:
    """Return a mask of the entries that training may move."""
    return ~(kept.taken | kept.off)


class FlatRestorer:
    """Restores many weights that lie in one flat vector, in one operation. The guard can be replaced.

    `views` maps a vector to the weights in it. A weight there may be larger than its guard (channel padding): what lies
    beyond is zero and stays zero. `scored` names the weights that may have mask scores. A restored vector is
    `free * vector + value`, where `free` is one or zero.
    """

    def __init__(self, vector: Tensor, views: Callable[[Tensor], Mapping[str, Tensor]], scored: Collection[str] = ()):
        self._vector, self._views = vector.detach(), views
        self.free, self.value = torch.ones_like(self._vector), torch.zeros_like(self._vector)
        self._guard: Guard = {}
        self._masks: dict[str, _ScoredWeight] = {}
        if scored:
            assert vector.grad is not None
            gradient, value = views(vector.grad), views(self.value)
            self._masks = {name: _ScoredWeight(gradient[name], value[name]) for name in scored if name in value}

    @torch.no_grad()
    def set_guard(self, guard: Guard, shapes: Mapping[str, torch.Size]) -> None:
        """Use this guard from now on; `shapes` are the true shapes of weights that are padded here."""
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
            free[name][within] = _free_entries(kept).to(kept.sealed.dtype).expand(kept.sealed.shape)
            value[name][within] = torch.where(kept.taken & ~kept.off, kept.sealed, 0.0)
        for name, mask in self._masks.items():
            mask.set_guard(guard.get(name))

    @torch.no_grad()
    def __call__(self, score_step: float | Tensor = 0.0) -> None:
        """Update the mask scores by a step, then restore the vector."""
        self.update_scores(score_step)
        self._vector.mul_(self.free).add_(self.value)

    @torch.no_grad()
    def update_scores(self, score_step: float | Tensor) -> None:
        """Update the mask scores by a step, and `value` by them."""
        for mask in self._masks.values():
            mask.update_scores(score_step)

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the scores back into the guard."""
        for name, mask in self._masks.items():
            scores = self._guard[name].scores if name in self._guard else None
            if scores is not None:
                scores.copy_(mask.scores[tuple(map(slice, scores.shape))])


class _ScoredWeight:
    """The mask scores of one weight in the vector; they switch entries of its `value` on and off."""

    def __init__(self, gradient: Tensor, value: Tensor):
        self.gradient, self.value = gradient, value
        self.sealed = torch.zeros_like(value)
        self.scores = value.new_ones(mask_shape(value.shape))
        self.usable = torch.zeros_like(self.scores)

    def set_guard(self, kept: Protected | None) -> None:
        """Copy the scores of a guard into fixed memory, which a captured graph can refer to."""
        self.sealed.copy_(self.value)
        self.scores.fill_(1.0)
        self.usable.zero_()
        if kept is not None and kept.scores is not None:
            within = tuple(map(slice, kept.scores.shape))
            self.scores[within] = kept.scores.to(self.scores.dtype)
            self.usable[within] = (kept.taken & ~kept.off).to(self.scores.dtype)

    def update_scores(self, score_step: float | Tensor) -> None:
        """Update the scores, and switch entries on and off by them."""
        update_scores(self.scores, self.gradient, self.sealed, self.usable, score_step)
        self.value.copy_(torch.where(self.scores > 0, self.sealed, 0.0))
