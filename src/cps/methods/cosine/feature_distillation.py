"""Distillation of features and maps: how far those of a model are from those of its teacher."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Maps = Sequence[Tensor]  # of each stage: (N, channels, height, width)


def angular_distance(features: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean of `1 - cos` between the features (N, d) of images and those of the teacher."""
    return 1 - F.cosine_similarity(features.float(), teacher.float(), dim=1).mean()


def pooled_distance(maps: Maps, teacher: Maps) -> Tensor:
    """Return the mean distance of pooled maps over stages and images (PODNet's POD-spatial).

    Squared maps are summed over their width and over their height; both sums together have unit length. So the distance
    does not see signs.
    """
    return torch.stack([(_pool(one) - _pool(other)).norm(dim=1).mean() for one, other in _pairs(maps, teacher)]).mean()


def channel_distance(maps: Maps, teacher: Maps, importances: Sequence[Tensor]) -> Tensor:
    """Return the mean distance of squared maps over stages, images and channels, weighed by channel (AFC).

    The squared map of a channel has unit length over its pixels. `importances` are the weights of a stage's channels.
    """
    distances = []
    for (one, other), importance in zip(_pairs(maps, teacher), importances, strict=True):
        parts = (F.normalize(each.square().flatten(2), dim=2) for each in (one, other))  # (N, channels, pixels)
        first, second = parts
        distances.append((importance * (first - second).norm(dim=2)).mean())
    return torch.stack(distances).mean()


def _pairs(maps: Maps, teacher: Maps) -> list[tuple[Tensor, Tensor]]:
    return [(one.float(), other.float()) for one, other in zip(maps, teacher, strict=True)]


def _pool(maps: Tensor) -> Tensor:
    """Return the sums of squared maps over their width and over their height, of unit length for each image."""
    squares = maps.square()
    return F.normalize(torch.cat([squares.sum(dim=3).flatten(1), squares.sum(dim=2).flatten(1)], dim=1), dim=1)
