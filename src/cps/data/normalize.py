"""Pixels: what a backbone sees of an image, scaled and normalised."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from cps.storage.settings_codec import NumericSettings, setting


@setting
@dataclass(frozen=True)
class Normalize(NumericSettings):
    """Subtract a mean and divide by a deviation, per channel, on pixels from 0 to 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.mean) != len(self.std) or 0 in self.std:
            raise ValueError("Normalize takes as many means as deviations, and no deviation of zero")

    def __call__(self, images: Tensor) -> Tensor:
        """Return the normalised images."""
        if images.shape[1] != len(self.mean):
            raise ValueError(f"expected images of {len(self.mean)} channels to normalise, got {images.shape[1]}")
        return _normalised(images, *(_on_device(v, images.device, images.dtype) for v in (self.mean, self.std)))

    def as_layer(self, device: torch.device) -> "NormalizeLayer":
        """Return the same as a layer."""
        return NormalizeLayer(*(torch.tensor(values, device=device) for values in (self.mean, self.std)))


PIXELS = (0.0, 1.0)  # what bytes become
IMAGENET = Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # what its images have


def as_pixels(images: Tensor, normalize: Normalize | None) -> Tensor:
    """Return what the backbone sees: bytes scaled to 0..1, then normalised."""
    pixels = as_floats(images)
    return pixels if normalize is None else normalize(pixels)


def as_floats(images: Tensor) -> Tensor:
    """Return images in memory of their own: bytes scaled to 0..1, all else as it is."""
    return images.float() / 255 if images.dtype == torch.uint8 else images.to(torch.float32, copy=True)


def range_of(images: Tensor) -> tuple[float, float]:
    """Return the smallest and the largest value of images, as bytes those that they may have."""
    if images.dtype == torch.uint8:
        return PIXELS
    low, high = images.aminmax()
    return float(low), float(high)


def are_pixels(low: float, high: float) -> bool:
    """Say whether a range is that of pixels."""
    return low >= PIXELS[0] and high <= PIXELS[1]


@dataclass(frozen=True)
class Prepare:
    """Raw images -> what the backbone sees, in the type of its weights."""

    normalize: Normalize | None = None
    dtype: torch.dtype = torch.float32

    def __call__(self, images: Tensor) -> Tensor:
        """Return the pixels."""
        return as_pixels(images, self.normalize).to(self.dtype)


class NormalizeLayer(nn.Module):
    """The normalisation as a layer, for networks that leave the library."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Tensor, std: Tensor):
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, images: Tensor) -> Tensor:
        """Return the normalised images."""
        return _normalised(images, self.mean, self.std)


def _normalised(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return images of any rank, by the mean and the deviation of each channel."""
    shape = (1, -1, *(1 for _ in images.shape[2:]))
    return (images - mean.reshape(shape)) / std.reshape(shape)


def _on_device(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the values as a tensor, made once for each device: a captured step may not copy from the CPU."""
    if torch.compiler.is_compiling():  # then it is a constant anyway
        return torch.tensor(values, device=device, dtype=dtype)
    return _made_once(values, device, dtype)


@lru_cache
def _made_once(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, device=device, dtype=dtype)
