"""Capacity: how many weights a task may take, and what happens when few are free."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cps.network.masks import Masks, topk_mask
from cps.storage.settings_codec import NumericSettings, setting

MIN_FREE = 0.05  # a layer with a smaller share of free weights is short of weights ...
MIN_SHORT = 0.1  # ... which matters if such layers hold at least this share of all weights


class CapacityError(RuntimeError):
    """Raised when a new task has nothing left to learn with."""


class CapacityWarning(UserWarning):
    """Warns that some layers have hardly any free weights left."""


@setting
@dataclass(frozen=True)
class Capacity(NumericSettings):
    """How tasks share the weights.

    `min_free`: once layers that hold a tenth of all weights have a smaller share of free weights, a task learns which
    sealed weights to use. With 0 every task starts from all of them, as in the paper. `budget`: the largest share of
    each layer that a task may take per class, so that later tasks find free weights: 0.01 is enough for a hundred
    classes, and 1 is no limit. Each round of pruning approaches the budget by the same factor; without rounds there is
    no limit.
    """

    RENAMED: ClassVar = {"crowded": "min_free"}

    min_free: float = MIN_FREE
    budget: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("min_free", 0 <= self.min_free <= 1, must="in [0, 1]")
        self._require("budget", 0 < self.budget <= 1, must="in (0, 1]")

    def limit(
        self, masks: Masks, taken: Masks, weights: Mapping[str, Tensor], classes: int, progress: float = 1.0
    ) -> Masks:
        """Return masks that take no more of each layer than the budget of `classes`; the largest weights stay.

        `progress` is the share of pruning rounds that are done after this one.
        """
        share = min(1.0, self.budget * classes) ** progress
        return {name: _limit_layer(mask, taken[name], weights[name], share) for name, mask in masks.items()}


def _limit_layer(mask: Tensor, taken: Tensor, weight: Tensor, share: float) -> Tensor:
    new, most = mask & ~taken, max(1, int(share * mask.numel()))
    if int(new.sum()) <= most:
        return mask
    return (mask & taken) | topk_mask(weight, new, most)


def is_short_of_weights(free: Mapping[str, float], weights: Mapping[str, Tensor], min_free: float) -> bool:
    """Return True if layers with a tenth of all weights have less than this share free."""
    return bool(_short_layers(free, weights, min_free))


def check_capacity(
    free: Mapping[str, float], weights: Mapping[str, Tensor], tasks: int, *, has_private: bool, learns_masks: bool
) -> None:
    """Warn if layers have hardly any free weights; raise `CapacityError` if a task could learn nothing at all.

    `free` is the share of each weight that none of the `tasks` subnetworks has taken. `has_private` tells whether the
    backbone has private parameters to learn, and `learns_masks` whether the task learns which sealed weights to use.
    """
    if max(free.values(), default=0) == 0 and not has_private and not learns_masks:
        raise CapacityError(
            f"the new task found no free weights (100% taken by {tasks} subnetworks) and the backbone has no other "
            "parameters to learn; use a wider backbone or a smaller alpha"
        )
    short = _short_layers(free, weights, MIN_FREE)
    if not short:
        return
    way = "learns which sealed weights to use" if learns_masks else "can only reuse sealed weights there"
    figures = ", ".join(f"'{name.removesuffix('.weight')}' {free[name]:.1%}" for name in short[:3])
    warnings.warn(
        f"{len(short)} of {len(free)} layers have less than {MIN_FREE:.0%} free weights ({figures}); the new task "
        f"{way}; use a wider backbone or a smaller alpha",
        CapacityWarning,
        stacklevel=5,  # the caller of `learn`
    )


def _short_layers(free: Mapping[str, float], weights: Mapping[str, Tensor], min_free: float) -> list[str]:
    """Return the layers with less than this share free, fullest first, or none if they hold few of all weights."""
    short = sorted((name for name in free if free[name] < min_free), key=lambda name: free[name])
    total = sum(weights[name].numel() for name in free)
    return short if sum(weights[name].numel() for name in short) >= MIN_SHORT * total else []
