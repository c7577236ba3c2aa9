"""Capacity: what is left for a new task to learn with."""

import warnings
from collections.abc import Mapping

from torch import Tensor

FREE_SHARE = 0.05  # a layer with less than this free is short of room ...
SHORT_SHARE = 0.1  # ... and worth a warning when such layers hold this share of all weights


class CapacityError(RuntimeError):
    """Nothing is left that a new task could learn with."""


class CapacityWarning(UserWarning):
    """Some layers have hardly any free weights left."""


def check_capacity(free: Mapping[str, float], weights: Mapping[str, Tensor], tasks: int, *, learns: bool) -> None:
    """Warn when layers have hardly any free weights; raise when a task could learn nothing at all.

    `free` is the share of each weight that none of the `tasks` subnetworks has taken; `learns` says whether the
    backbone has anything else to learn.
    """
    if max(free.values()) == 0 and not learns:
        raise CapacityError(
            f"task {tasks} found no free weights (100% taken by {tasks} subnetworks) and the backbone has "
            "nothing else to learn; use a wider backbone or a smaller alpha"
        )
    short = sorted((share, name) for name, share in free.items() if share < FREE_SHARE)
    total = sum(weight.numel() for weight in weights.values())
    if sum(weights[name].numel() for _, name in short) < SHORT_SHARE * total:
        return
    figures = ", ".join(f"'{name.removesuffix('.weight')}' {share:.1%}" for share, name in short[:3])
    warnings.warn(
        f"task {tasks}: {len(short)} of {len(free)} layers have less than {FREE_SHARE:.0%} free weights "
        f"({figures}); there it can only reuse sealed weights; use a wider backbone or a smaller alpha",
        CapacityWarning,
        stacklevel=5,
    )
