"""Augmentation in batches, on whatever device the images are.

An augmentation is a function (images, uniform) -> images, where `uniform` has one row of `draws` random numbers
from 0 to 1 for each image. They are drawn on the CPU, so the same seed augments alike on every device.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cps.plain import setting


class Augmentation(Protocol):
    """Anything that changes images by random numbers given to it."""

    @property
    def draws(self) -> int:
        """How many random numbers each image needs."""
        ...

    def __call__(self, images: Tensor, uniform: Tensor) -> Tensor:
        """Return the images, each changed by its own row of `uniform`, shape (images, draws)."""
        ...


@setting
@dataclass(frozen=True)
class PadCrop:
    """Pad the images with black by `padding` pixels and crop them back to their size at a random place."""

    padding: int = 4

    @property
    def draws(self) -> int:
        """How many random numbers each image needs."""
        return 2

    def __call__(self, images: Tensor, uniform: Tensor) -> Tensor:
        """Return the images, each shifted by its own draw."""
        number, _, height, width = images.shape
        padded = F.pad(images, [self.padding] * 4)
        top, left = (uniform * (2 * self.padding + 1)).long().unbind(dim=1)
        rows = top[:, None] + torch.arange(height, device=images.device)  # (number, height)
        columns = left[:, None] + torch.arange(width, device=images.device)  # (number, width)
        image = torch.arange(number, device=images.device)[:, None, None]
        return padded.permute(0, 2, 3, 1)[image, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


@setting
@dataclass(frozen=True)
class Flip:
    """Mirror each image left to right with probability one half."""

    @property
    def draws(self) -> int:
        """How many random numbers each image needs."""
        return 1

    def __call__(self, images: Tensor, uniform: Tensor) -> Tensor:
        """Return the images, each mirrored or not by its own draw."""
        return torch.where(uniform[:, :1, None, None] < 0.5, images.flip(-1), images)


@setting
@dataclass(frozen=True)
class Chain:
    """Several augmentations, one after the other."""

    steps: tuple[Augmentation, ...]

    @property
    def draws(self) -> int:
        """How many random numbers each image needs."""
        return sum(step.draws for step in self.steps)

    def __call__(self, images: Tensor, uniform: Tensor) -> Tensor:
        """Return the images after every step."""
        for step, own in zip(self.steps, uniform.split([step.draws for step in self.steps], dim=1), strict=True):
            images = step(images, own)
        return images
