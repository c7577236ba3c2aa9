"""Choices: which sealed weights a task uses, learned where hardly any weight is free.

Every connection has a score and is on while that is positive. The gradient of a score is taken straight through the
switch: it is that of the weights times the weights, whether they are on or off. So nothing but the guard has to know
of scores; a backbone just holds zeros where they are off.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from cps.network.masks import per_connection

REACH = 10.0  # how far scores, which start at one, could move in a whole training at its full rate


def first_scores(masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the scores of connections that are all on."""
    return {name: torch.ones(mask.shape, dtype=torch.float32, device=mask.device) for name, mask in masks.items()}


def move_scores(scores: Tensor, gradient: Tensor, sealed: Tensor, usable: Tensor, pace: float | Tensor) -> None:
    """Move the scores of usable connections down their gradient, in place, by `pace` in root mean square.

    A gradient that overflows moves none: in mixed precision such a step is skipped.
    """
    gain = per_connection(gradient * sealed) * usable
    size = (gain.square().sum() / usable.sum().clamp(min=1)).sqrt()
    step = pace * gain / size.clamp(min=1e-30)
    scores.sub_(step.masked_fill(~size.isfinite(), 0.0))
