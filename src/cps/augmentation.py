"""Augmentation in batches: one random draw per image, on whatever device the images are.

An augmentation is a function (images, generator) -> images. The generator lives on the CPU, so that the
same seed draws the same augmentation on every device.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cps.plain import setting

Augmentation = Callable[[Tensor, torch.Generator], Tensor]


@setting
@dataclass(frozen=True)
class PadCrop:
    """Pad the images with black by `padding` pixels and crop them back to their size at a random place."""

    padding: int = 4

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return the images, each shifted by its own draw."""
        number, _, height, width = images.shape
        padded = F.pad(images, [self.padding] * 4)
        top, left = torch.randint(0, 2 * self.padding + 1, (2, number), generator=generator)
        rows = (top[:, None] + torch.arange(height)).to(images.device)  # (number, height)
        columns = (left[:, None] + torch.arange(width)).to(images.device)  # (number, width)
        image = torch.arange(number, device=images.device)[:, None, None]
        return padded.permute(0, 2, 3, 1)[image, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


@setting
@dataclass(frozen=True)
class Flip:
    """Mirror each image left to right with probability one half."""

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return the images, each mirrored or not by its own draw."""
        mirrored = torch.rand(len(images), generator=generator) < 0.5
        mirrored = mirrored.to(images.device)[:, None, None, None]
        return torch.where(mirrored, images.flip(-1), images)


@setting
@dataclass(frozen=True)
class Chain:
    """Several augmentations, one after the other."""

    steps: tuple[Augmentation, ...]

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return the images after every step."""
        for step in self.steps:
            images = step(images, generator)
        return images
