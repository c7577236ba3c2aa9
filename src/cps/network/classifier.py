"""A backbone with a linear head, and the protocol of its loss."""

from typing import Protocol

import torch
from torch import Tensor, nn


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


@torch.no_grad()
def make_head(features: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    """Return a head initialised by this generator alone."""
    head = nn.Linear(features, outputs, device="meta", dtype=torch.float32).to_empty(device="cpu")
    for parameter in head.parameters():
        parameter.uniform_(-(features**-0.5), features**-0.5, generator=generator)
    return head
