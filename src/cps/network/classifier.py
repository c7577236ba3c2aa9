"""A backbone with a linear head, and the protocol of its loss."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SMOOTHING = 1e-4  # of square roots near 0


class Loss(Protocol):
    """A training loss."""

    def __call__(self, features: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """Return a scalar loss for features (N, d), logits (N, outputs) and labels, the index of the true output."""
        ...


class Classifier(nn.Module):
    """A backbone with a head: pixels -> logits over the task's classes, or their loss."""

    def __init__(self, backbone: nn.Module, head: nn.Linear):
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, pixels: Tensor, labels: Tensor | None = None, loss: Loss | None = None) -> Tensor:
        """Return the logits, shape (N, classes), or the loss if labels and a loss are given."""
        features, logits = self.outputs(pixels)
        return logits if labels is None or loss is None else loss(features, logits, labels)

    def outputs(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features (N, d) and the logits (N, classes)."""
        features = self.backbone(pixels)
        by_autocast = torch.is_autocast_enabled(features.device.type) and features.dtype != torch.float64
        return features, self.head(features if by_autocast else features.to(self.head.weight.dtype))


class RootHead(nn.Linear):
    """A head that reads the signed square roots of the features, scaled to the length `SCALE`.

    So it can be added to a closed form, which reads such features, too.
    """

    SCALE = 10.0  # with features of unit length the head would hardly learn

    def forward(self, input: Tensor) -> Tensor:
        """Return the logits, shape (N, outputs), of features (N, d)."""
        features = input.float()
        roots = features * (features.abs() + SMOOTHING).rsqrt()  # the derivative of a square root is infinite at 0
        return super().forward(self.SCALE * F.normalize(roots, dim=1))


@torch.no_grad()
def make_head(features: int, outputs: int, generator: torch.Generator, kind: type[nn.Linear] = nn.Linear) -> nn.Linear:
    """Return a head of this kind, initialised by this generator alone."""
    head = kind(features, outputs, device="meta", dtype=torch.float32).to_empty(device="cpu")
    for parameter in head.parameters():
        parameter.uniform_(-(features**-0.5), features**-0.5, generator=generator)
    return head
