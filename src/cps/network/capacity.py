"""Capacity: what is left for a new task to learn with."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from cps.network.masks import Masks, topk_mask
from cps.storage.settings_codec import NumericSettings, setting

FREE_SHARE = 0.05  # a layer with less than this free is short of room ...
SHORT_SHARE = 0.1  # ... and matters when such layers hold this share of all weights


class CapacityError(RuntimeError):
    """Nothing is left that a new task could learn with."""


class CapacityWarning(UserWarning):
    """Some layers have hardly any free weights left."""


@setting
@dataclass(frozen=True)
class Capacity(NumericSettings):
    """How tasks share the room there is.

    `crowded`: once layers with a tenth of all weights have less than this share free, a task learns which sealed ones
    to use; with 0 it starts from all of them, as in the paper. `budget`: the largest share of each layer that a task
    may take for each of its classes, so that later ones find room there: with 0.01 a hundred classes do; 1 sets no
    limit. It is reached by the same factor in every round of pruning, and without rounds it is not.
    """

    crowded: float = FREE_SHARE
    budget: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("crowded", 0 <= self.crowded <= 1, must="in [0, 1]")
        self._require("budget", 0 < self.budget <= 1, must="in (0, 1]")

    def within(
        self, masks: Masks, taken: Masks, weights: Mapping[str, Tensor], classes: int, progress: float = 1.0
    ) -> Masks:
        """Return masks that take no more of each layer than so many classes may; the strongest connections stay.

        `progress` is the share of the rounds that are done after this one.
        """
        share = min(1.0, self.budget * classes) ** progress
        return {name: _limited(mask, taken[name], weights[name], share) for name, mask in masks.items()}


def _limited(mask: Tensor, taken: Tensor, weight: Tensor, share: float) -> Tensor:
    new, most = mask & ~taken, max(1, int(share * mask.numel()))
    if int(new.sum()) <= most:
        return mask
    return (mask & taken) | topk_mask(weight, new, most)


def is_crowded(free: Mapping[str, float], weights: Mapping[str, Tensor], share: float) -> bool:
    """Say whether layers that matter have less than this share free, so that a task is to choose sealed weights."""
    return bool(_short_of_room(free, weights, share))


def check_capacity(
    free: Mapping[str, float], weights: Mapping[str, Tensor], tasks: int, *, learns: bool, chooses: bool
) -> None:
    """Warn when layers have hardly any free weights; raise when a task could learn nothing at all.

    `free` is the share of each weight that none of the `tasks` subnetworks has taken; `learns` says whether the
    backbone has anything else to learn, `chooses` whether the task learns which sealed weights to use.
    """
    if max(free.values(), default=0) == 0 and not learns and not chooses:
        raise CapacityError(
            f"the new task found no free weights (100% taken by {tasks} subnetworks) and the backbone has "
            "nothing else to learn; use a wider backbone or a smaller alpha"
        )
    short = _short_of_room(free, weights, FREE_SHARE)
    if not short:
        return
    way = "learns which sealed weights to use" if chooses else "can only reuse sealed weights there"
    figures = ", ".join(f"'{name.removesuffix('.weight')}' {free[name]:.1%}" for name in short[:3])
    warnings.warn(
        f"{len(short)} of {len(free)} layers have less than {FREE_SHARE:.0%} free weights ({figures}); the new task "
        f"{way}; use a wider backbone or a smaller alpha",
        CapacityWarning,
        stacklevel=5,  # whoever calls `learn`
    )


def _short_of_room(free: Mapping[str, float], weights: Mapping[str, Tensor], share: float) -> list[str]:
    """Return the layers with less than this share free, fullest first, or none where they hold few of all weights."""
    short = sorted((name for name in free if free[name] < share), key=lambda name: free[name])
    total = sum(weights[name].numel() for name in free)
    return short if sum(weights[name].numel() for name in short) >= SHORT_SHARE * total else []
