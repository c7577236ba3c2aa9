"""Augmentation of whole batches, on the device of the images.

An augmentation is a function (images, uniform) -> images. `uniform` has one row of `draws` random numbers in [0, 1)
per image. They are drawn on the CPU, so that a seed gives the same augmentation on every device.
"""

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cps.storage.settings_codec import NumericSettings, setting


class Augmentation(Protocol):
    """A function that changes images by the random numbers it is given."""

    @property
    def draws(self) -> int:
        """The number of random numbers per image."""
        ...

    def __call__(self, images: Tensor, uniform: Tensor) -> Tensor:
        """Return the images, each changed by its own row of `uniform`, shape (images, draws)."""
        ...


@setting
@dataclass(frozen=True)
class PadCrop(NumericSettings):
    """Pad each image with `padding` black pixels and crop it to its old size at a random position."""

    padding: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("padding", self.padding >= 0, must="a number of pixels, 0 or more")

    @property
    def draws(self) -> int:
        """The number of random numbers per image."""
        return 2

    def __call__(self, images: Tensor, uniform: Tensor) -> Tensor:
        """Return the images, each shifted by its own random numbers."""
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
    """Flip each image left to right with probability one half."""

    @property
    def draws(self) -> int:
        """The number of random numbers per image."""
        return 1

    def __call__(self, images: Tensor, uniform: Tensor) -> Tensor:
        """Return the images, each flipped or not by its own random number."""
        return torch.where(uniform[:, :1, None, None] < 0.5, images.flip(-1), images)


@setting
@dataclass(frozen=True)
class ResizedCrop(NumericSettings):
    """Crop a part of each image, of random area, aspect ratio and position, and scale it to the image's size.

    `area` is a range of fractions of the image; `shape` is a range of aspect ratios (width / height).
    """

    area: tuple[float, float] = (0.08, 1.0)
    shape: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("area", 0 < self.area[0] <= self.area[1] <= 1, must="a range within (0, 1]")
        self._require("shape", 0 < self.shape[0] <= self.shape[1], must="a range above 0")

    @property
    def draws(self) -> int:
        """The number of random numbers per image."""
        return 4

    def __call__(self, images: Tensor, uniform: Tensor) -> Tensor:
        """Return the images, each cropped by its own random numbers."""
        area = self.area[0] + uniform[:, 0] * (self.area[1] - self.area[0])
        lowest, highest = math.log(self.shape[0]), math.log(self.shape[1])
        shape = torch.exp(lowest + uniform[:, 1] * (highest - lowest))
        width, height = (area * shape).sqrt().clamp(max=1), (area / shape).sqrt().clamp(max=1)
        left, top = (2 * uniform[:, 2] - 1) * (1 - width), (2 * uniform[:, 3] - 1) * (1 - height)
        zero = torch.zeros_like(area)
        return _warp(images, [[width, zero, left], [zero, height, top]], outside="border")


@setting
@dataclass(frozen=True)
class Rotate(NumericSettings):
    """Rotate each image about its centre by a random angle of at most `degrees` either way, on a black background."""

    degrees: float = 15.0

    @property
    def draws(self) -> int:
        """The number of random numbers per image."""
        return 1

    def __call__(self, images: Tensor, uniform: Tensor) -> Tensor:
        """Return the images, each rotated by its own random number."""
        angle = (2 * uniform[:, 0] - 1) * math.radians(self.degrees)
        height, width = images.shape[-2:]
        across = -angle.sin() * (height / width)
        down = angle.sin() * (width / height)
        zero = torch.zeros_like(angle)
        return _warp(images, [[angle.cos(), across, zero], [down, angle.cos(), zero]], outside="zeros")


@setting
@dataclass(frozen=True)
class Colour(NumericSettings):
    """Change brightness, contrast and saturation, each by a random factor from 1 - strength to 1 + strength."""

    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("brightness", "contrast", "saturation"):
            self._require(name, 0 <= getattr(self, name) <= 1, must="in [0, 1]")

    @property
    def draws(self) -> int:
        """The number of random numbers per image."""
        return 3

    def __call__(self, images: Tensor, uniform: Tensor) -> Tensor:
        """Return the images, each changed by its own random numbers."""
        strengths = (self.brightness, self.contrast, self.saturation)
        bright, contrast, saturation = (
            (1 + (2 * uniform[:, index] - 1) * strength)[:, None, None, None]
            for index, strength in enumerate(strengths)
        )
        pixels = _clip(images.float() * bright, images)
        pixels = _clip(torch.lerp(_luminance(pixels).mean(dim=(2, 3), keepdim=True), pixels, contrast), images)
        return _cast(torch.lerp(_luminance(pixels), pixels, saturation), images)


@setting
@dataclass(frozen=True)
class Chain:
    """Apply several augmentations in order."""

    steps: tuple[Augmentation, ...]

    @property
    def draws(self) -> int:
        """The number of random numbers per image."""
        return sum(step.draws for step in self.steps)

    def __call__(self, images: Tensor, uniform: Tensor) -> Tensor:
        """Return the images after all steps."""
        for step, own in zip(self.steps, uniform.split([step.draws for step in self.steps], dim=1), strict=True):
            images = step(images, own)
        return images


def _warp(images: Tensor, matrix: list[list[Tensor]], outside: Literal["border", "zeros"]) -> Tensor:
    """Sample each image through its own affine map of the square [-1, 1] x [-1, 1]."""
    maps = torch.stack([torch.stack(row, dim=1) for row in matrix], dim=1)  # (number, 2, 3)
    grid = F.affine_grid(maps, list(images.shape), align_corners=False)
    return _cast(F.grid_sample(images.float(), grid, padding_mode=outside, align_corners=False), images)


def _luminance(pixels: Tensor) -> Tensor:
    """Return the brightness of colour images; other images are returned unchanged."""
    if pixels.shape[1] != 3:
        return pixels
    red, green, blue = pixels.split(1, dim=1)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def _clip(pixels: Tensor, like: Tensor) -> Tensor:
    """Clip pixels to the range of the images they were made from: 0 to 255 for bytes, 0 to 1 for floats."""
    return pixels.clamp(0, 255 if like.dtype == torch.uint8 else 1)


def _cast(pixels: Tensor, like: Tensor) -> Tensor:
    """Cast pixels to the type of the images they were made from."""
    return _clip(pixels.round(), like).to(torch.uint8) if like.dtype == torch.uint8 else pixels.to(like.dtype)
