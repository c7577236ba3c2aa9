"""Mask scores: learn which sealed weights a task uses when hardly any weight is free.

Every connection has a score and is on while the score is positive. Gradients pass straight through the mask: the
gradient of a score is that of its weights times the weights, whether they are on or off. Only the guard that protects
sealed weights needs to know about scores; the backbone simply holds zeros where connections are off.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from cps.network.masks import per_connection

SCORE_RANGE = 10.0  # how far scores, which start at 1, can move in one whole training at its full learning rate


def initial_scores(masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the scores of connections that are all on."""
    return {name: torch.ones(mask.shape, dtype=torch.float32, device=mask.device) for name, mask in masks.items()}


def update_scores(scores: Tensor, gradient: Tensor, sealed: Tensor, usable: Tensor, step: float | Tensor) -> None:
    """Move the scores of usable connections down their gradient, in place, by `step` in root mean square.

    A gradient that overflows moves nothing, as mixed precision skips such a step too.
    """
    slope = per_connection(gradient * sealed) * usable
    size = (slope.square().sum() / usable.sum().clamp(min=1)).sqrt()
    change = step * slope / size.clamp(min=1e-30)
    scores.sub_(change.masked_fill(~size.isfinite(), 0.0))
