"""Losses: functions of features, logits and labels that training minimises."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cps.storage.settings_codec import NumericSettings, setting


@setting
@dataclass(frozen=True)
class CrossEntropy:
    """The cross-entropy of the logits."""

    def __call__(self, features: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of a batch."""
        return F.cross_entropy(_at_least_float32(logits), labels)


@setting
@dataclass(frozen=True)
class SmoothedCrossEntropy(NumericSettings):
    """The cross-entropy of the logits with smoothed labels: a share `smoothing` is spread over all outputs.

    The features of few images overfit less, so a closed form of them generalises better.
    """

    smoothing: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("smoothing", 0 <= self.smoothing < 1, must="in [0, 1)")

    def __call__(self, features: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of a batch."""
        return F.cross_entropy(_at_least_float32(logits), labels, label_smoothing=self.smoothing)


@setting
@dataclass(frozen=True)
class Contrastive(NumericSettings):
    """Cross-entropy plus `weight` times the supervised contrastive loss.

    The contrastive loss pulls normalised features of the same output together and pushes all others apart. A smaller
    `temperature` puts more weight on the nearest features.
    """

    weight: float = 0.5
    temperature: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("weight", self.weight >= 0, must="0 or more")
        self._require("temperature", self.temperature > 0, must="positive")

    def __call__(self, features: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of both losses."""
        with torch.autocast(features.device.type, enabled=False):
            contrastive = supervised_contrastive_loss(_at_least_float32(features), labels, self.temperature)
        return F.cross_entropy(_at_least_float32(logits), labels) + self.weight * contrastive


def supervised_contrastive_loss(features: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Return the mean negative log-probability of picking an image of the same label from the rest of the batch.

    The probabilities are the softmax of the cosine similarities over the temperature. Images that are the only one
    of their label do not count.
    """
    points = F.normalize(features, dim=1)
    similarity = points @ points.T / temperature  # (N, N)
    diagonal = torch.eye(len(points), dtype=torch.bool, device=points.device)
    log_probability = similarity.masked_fill(diagonal, -torch.inf).log_softmax(dim=1).masked_fill(diagonal, 0.0)
    is_positive = ((labels[:, None] == labels[None]) & ~diagonal).to(points.dtype)  # (N, N)
    positives = is_positive.sum(dim=1)
    losses = -(log_probability * is_positive).sum(dim=1) / positives.clamp(min=1)
    return losses.sum() / (positives > 0).sum().clamp(min=1)


def _at_least_float32(values: Tensor) -> Tensor:
    """Return values in float32 if they have fewer bits."""
    return values.float() if values.element_size() < 4 else values
