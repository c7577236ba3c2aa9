"""Noise that is added to gradients."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from cps.storage.settings_codec import NumericSettings, setting


@setting
@dataclass(frozen=True)
class GradientNoise(NumericSettings):
    """Normal noise of variance `scale / (1 + epoch)^decay` (Neelakantan et al., 2015)."""

    scale: float = 0.3
    decay: float = 0.55

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("scale", self.scale >= 0, must="0 or more")

    @torch.no_grad()
    def add_to(
        self, parameters: Iterable[nn.Parameter], epoch: int, draws: torch.Generator, *, batch_size: int = 1
    ) -> None:
        """Add noise to the gradients of a loss that is a mean over `batch_size` images; the noise is that of a sum."""
        deviation = (self.scale / (1 + epoch) ** self.decay) ** 0.5 / batch_size
        for parameter in parameters:
            if parameter.grad is not None:
                noise = torch.randn(parameter.shape, generator=draws, device=draws.device)
                parameter.grad.add_(noise, alpha=deviation)
