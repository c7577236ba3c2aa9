"""Losses: what training makes small, a function of features, logits and labels."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cps.storage.settings_codec import NumericSettings, setting


@setting
@dataclass(frozen=True)
class CrossEntropy:
    """The usual loss of classifiers."""

    def __call__(self, features: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        return F.cross_entropy(_wide(logits), labels)


@setting
@dataclass(frozen=True)
class Contrastive(NumericSettings):
    """Cross-entropy, and a term that draws features of the same output together and all others apart.

    The term is the supervised contrastive loss on features of unit length, with a `weight`; a small `temperature`
    looks at the nearest ones most.
    """

    weight: float = 0.5
    temperature: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight < 0 or self.temperature <= 0:
            raise ValueError(f"the weight must not be negative and the temperature positive, got {self}")

    def __call__(self, features: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of both terms."""
        with torch.autocast(features.device.type, enabled=False):
            apart = supervised_contrast(_wide(features), labels, self.temperature)
        return F.cross_entropy(_wide(logits), labels) + self.weight * apart


def supervised_contrast(features: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Return how unlikely each image is to choose, by likeness, one of its own label among all others in the batch."""
    points = F.normalize(features, dim=1)
    likeness = points @ points.T / temperature
    itself = torch.eye(len(points), dtype=torch.bool, device=points.device)
    chosen = likeness.masked_fill(itself, -torch.inf).log_softmax(dim=1).masked_fill(itself, 0.0)
    friends = ((labels[:, None] == labels[None]) & ~itself).to(points.dtype)  # (N, N)
    number = friends.sum(dim=1)
    each = -(chosen * friends).sum(dim=1) / number.clamp(min=1)
    return each.sum() / (number > 0).sum().clamp(min=1)


def _wide(values: Tensor) -> Tensor:
    """Return numbers in at least 32 bits."""
    return values.float() if values.element_size() < 4 else values
