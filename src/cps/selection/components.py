"""Components: the few numbers that tell most about features."""

import torch
import torch.nn.functional as F
from torch import Tensor

from cps.runtime.devices import as_float64

MANY = 1024  # features, of which more are searched for their main directions little by little ...
PASSES = 8  # ... in so many passes over the images


def evened(features: Tensor) -> Tensor:
    """Return the square roots of features at unit length, whose clusters are rounder."""
    return F.normalize(features.sign() * features.abs().sqrt(), dim=1)


def components_of(features: Tensor, size: int) -> Tensor:
    """Return the directions in which features vary most, shape (features, size at most)."""
    apart = features - features.mean(dim=0)
    if apart.shape[1] <= MANY:
        return _directions(apart, size)
    span = _span(apart, min(2 * size, apart.shape[1]))
    return span @ _directions(apart @ span, size)


def _directions(apart: Tensor, size: int) -> Tensor:
    _, directions = torch.linalg.eigh(as_float64(apart.T @ apart))
    return directions.flip(1)[:, :size].to(apart).contiguous()


def _span(apart: Tensor, size: int) -> Tensor:
    """Return directions that hold nearly all there is of the first components, without a matrix of all features."""
    draws = torch.Generator().manual_seed(0)
    span = torch.randn(apart.shape[1], size, dtype=torch.float32, generator=draws).to(apart)
    for _ in range(PASSES):
        wider, _ = torch.linalg.qr(as_float64(apart.T @ (apart @ span)))
        span = wider.to(apart)
    return span
