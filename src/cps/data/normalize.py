"""Turn raw images into the pixels that a backbone reads: scale bytes to 0..1 and normalise."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cps.runtime.process_state import constant
from cps.storage.settings_codec import NumericSettings, setting


@setting
@dataclass(frozen=True)
class Normalize(NumericSettings):
    """Subtract a mean and divide by a standard deviation per channel, on pixels from 0 to 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.mean) != len(self.std) or 0 in self.std:
            raise ValueError(
                "Normalize needs as many means as standard deviations, and each deviation must be non-zero, got "
                f"mean={self.mean}, std={self.std}"
            )

    def __call__(self, images: Tensor) -> Tensor:
        """Return the normalised images."""
        if images.shape[1] != len(self.mean):
            raise ValueError(f"expected images of {len(self.mean)} channels to normalise, got {images.shape[1]}")
        return _normalise(images, *(_on_device(v, images.device, images.dtype) for v in (self.mean, self.std)))

    def as_layer(self, device: torch.device) -> "NormalizeLayer":
        """Return a layer that normalises in the same way."""
        return NormalizeLayer(*(torch.tensor(values, device=device) for values in (self.mean, self.std)))


class NormalizeLayer(nn.Module):
    """Normalisation as a layer, for networks that are exported from the library."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Tensor, std: Tensor):
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, images: Tensor) -> Tensor:
        """Return the normalised images."""
        return _normalise(images, self.mean, self.std)


PIXEL_RANGE = (0.0, 1.0)  # of bytes after scaling
IMAGENET = Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True)
class Prepare:
    """Raw images -> scaled and normalised pixels, in the type of the backbone's weights."""

    normalize: Normalize | None = None
    dtype: torch.dtype = torch.float32

    def __call__(self, images: Tensor) -> Tensor:
        """Return the pixels."""
        pixels = as_floats(images)
        return (pixels if self.normalize is None else self.normalize(pixels)).to(self.dtype)


def as_floats(images: Tensor) -> Tensor:
    """Return a float32 copy of the images: bytes scaled to 0..1, other types unscaled."""
    return images.float() / 255 if images.dtype == torch.uint8 else images.to(torch.float32, copy=True)


def image_range(images: Tensor) -> tuple[float, float]:
    """Return the smallest and the largest value of images; for bytes, `PIXEL_RANGE`."""
    if images.dtype == torch.uint8:
        return PIXEL_RANGE
    low, high = images.aminmax()
    return float(low), float(high)


def is_pixel_range(low: float, high: float) -> bool:
    """Return True if values from `low` to `high` lie within `PIXEL_RANGE`."""
    return low >= PIXEL_RANGE[0] and high <= PIXEL_RANGE[1]


def _normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Normalise images (N, channels, ...) of any rank."""
    shape = (1, -1, *(1 for _ in images.shape[2:]))
    return (images - mean.reshape(shape)) / std.reshape(shape)


def _on_device(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the values as a cached tensor."""
    if torch.compiler.is_compiling():  # then it becomes a constant of the compiled code
        return torch.tensor(values, device=device, dtype=dtype)
    return constant(values, device, dtype)
