"""Augmentation in batches, on whatever device the images are.

An augmentation is a function (images, uniform) -> images, where `uniform` has one row of `draws` random numbers
from 0 to 1 for each image. They are drawn on the CPU, so the same seed augments alike on every device.
"""

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cps.storage.settings_codec import NumericSettings, setting


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
class PadCrop(NumericSettings):
    """Pad the images with black by `padding` pixels and crop them back to their size at a random place."""

    padding: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.padding < 0:
            raise ValueError(f"padding is a number of pixels, 0 or more, got {self.padding}")

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
class ResizedCrop(NumericSettings):
    """Cut out a part of each image, of random area, shape and place, and scale it back to the image's size."""

    area: tuple[float, float] = (0.08, 1.0)
    shape: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.area[0] <= self.area[1] <= 1 or not 0 < self.shape[0] <= self.shape[1]:
            raise ValueError(f"area is a range within 0 to 1 and shape one above 0, got {self.area} and {self.shape}")

    @property
    def draws(self) -> int:
        """How many random numbers each image needs."""
        return 4

    def __call__(self, images: Tensor, uniform: Tensor) -> Tensor:
        """Return the images, each cut by its own draws."""
        area = self.area[0] + uniform[:, 0] * (self.area[1] - self.area[0])
        lowest, highest = math.log(self.shape[0]), math.log(self.shape[1])
        shape = torch.exp(lowest + uniform[:, 1] * (highest - lowest))
        width, height = (area * shape).sqrt().clamp(max=1), (area / shape).sqrt().clamp(max=1)
        left, top = (2 * uniform[:, 2] - 1) * (1 - width), (2 * uniform[:, 3] - 1) * (1 - height)
        zero = torch.zeros_like(area)
        return _warped(images, [[width, zero, left], [zero, height, top]], outside="border")


@setting
@dataclass(frozen=True)
class Rotate(NumericSettings):
    """Turn each image about its middle, by at most so many degrees either way; what comes in is black."""

    degrees: float = 15.0

    @property
    def draws(self) -> int:
        """How many random numbers each image needs."""
        return 1

    def __call__(self, images: Tensor, uniform: Tensor) -> Tensor:
        """Return the images, each turned by its own draw."""
        angle = (2 * uniform[:, 0] - 1) * math.radians(self.degrees)
        height, width = images.shape[-2:]
        across = -angle.sin() * (height / width)
        down = angle.sin() * (width / height)
        zero = torch.zeros_like(angle)
        return _warped(images, [[angle.cos(), across, zero], [down, angle.cos(), zero]], outside="zeros")


@setting
@dataclass(frozen=True)
class Colour(NumericSettings):
    """Change brightness, contrast and saturation, each by a factor from 1 - strength to 1 + strength."""

    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(0 <= strength <= 1 for strength in (self.brightness, self.contrast, self.saturation)):
            raise ValueError(f"strengths are from 0 to 1, got {self}")

    @property
    def draws(self) -> int:
        """How many random numbers each image needs."""
        return 3

    def __call__(self, images: Tensor, uniform: Tensor) -> Tensor:
        """Return the images, each changed by its own draws."""
        strengths = (self.brightness, self.contrast, self.saturation)
        bright, contrast, saturation = (
            (1 + (2 * uniform[:, index] - 1) * strength)[:, None, None, None]
            for index, strength in enumerate(strengths)
        )
        pixels = _clipped(images.float() * bright, images)
        pixels = _clipped(torch.lerp(_grey(pixels).mean(dim=(2, 3), keepdim=True), pixels, contrast), images)
        return _as(torch.lerp(_grey(pixels), pixels, saturation), images)


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


def _warped(images: Tensor, matrix: list[list[Tensor]], outside: Literal["border", "zeros"]) -> Tensor:
    """Return the images, each looked at through its own affine map of the square from -1 to 1."""
    maps = torch.stack([torch.stack(row, dim=1) for row in matrix], dim=1)  # (number, 2, 3)
    grid = F.affine_grid(maps, list(images.shape), align_corners=False)
    return _as(F.grid_sample(images.float(), grid, padding_mode=outside, align_corners=False), images)


def _grey(pixels: Tensor) -> Tensor:
    """Return the brightness of colour images, and anything else as it is."""
    if pixels.shape[1] != 3:
        return pixels
    red, green, blue = pixels.split(1, dim=1)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def _clipped(pixels: Tensor, like: Tensor) -> Tensor:
    """Return the pixels within the range that images of this type have: bytes, or floats from 0 to 1."""
    return pixels.clamp(0, 255 if like.dtype == torch.uint8 else 1)


def _as(pixels: Tensor, like: Tensor) -> Tensor:
    """Return the pixels in the type of the images they were made from."""
    return _clipped(pixels.round(), like).to(torch.uint8) if like.dtype == torch.uint8 else pixels.to(like.dtype)
