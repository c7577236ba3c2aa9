"""Spaces: fixed features that belong to no task, so they treat the classes of all tasks alike.

A space is a setting; `make` returns the module that computes its features. Spaces without a pretrained network are
drawn from a seed, not from images: they are the same whichever tasks are learned in which order, model files need not
store them, and nothing in them can remember a forgotten task. So for a model file to stay readable, what a space
computes must never change, nor which one is the default.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cps.runtime.devices import fast_photos
from cps.storage.settings_codec import NumericSettings, setting

TINY_IMAGE = 16  # pixels of a side, up to which an image is one vector
LARGEST_SIDE = 32  # pixels; patches of larger images are taken from a reduced image

# Model files hold settings, so the memory that one can ask for is bounded: 256 MiB for the weights of a space, and less
# than 2 GiB while they are computed.
MOST_FEATURES = 16384  # of one space
MOST_VALUES = 4096  # of an image that RandomReLU multiplies with its weights
MOST_FILTER_VALUES = 768  # of one filter of RandomPatches; whitening takes the cube of it
MOST_SPACES = 4  # in one Joined

RESPONSES_AT_ONCE = {"cpu": 2**20, "other": 2**24}  # numbers; 4 MiB stay in the cache of a CPU


class Space(Protocol):
    """A map from the backbone's input to features that never changes."""

    def make(self, shape: tuple[int, ...], pretrained: Callable[[], nn.Module]) -> nn.Module:
        """Return a module: images (N, *shape), scaled and normalised -> features (N, d).

        The module must also process images of other heights and widths. `pretrained` returns the backbone with the
        weights it came with.
        """
        ...


@setting
@dataclass(frozen=True)
class RandomReLU(NumericSettings):
    """Random ReLU features of all values of an image: for tiny images and for inputs that are no images.

    Images larger than 16 x 16 are reduced to that size first, and inputs of more than 4,096 values further, by
    averaging neighbours. Images of another size than those of the first task are brought to its size.
    """

    size: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("size", 1 <= self.size <= MOST_FEATURES, must=f"in [1, {MOST_FEATURES}]")

    def make(self, shape: tuple[int, ...], pretrained: Callable[[], nn.Module]) -> nn.Module:
        """Return the module that computes the features."""
        return _RandomReLUFeatures(shape, self.size)


@setting
@dataclass(frozen=True)
class RandomPatches(NumericSettings):
    """Responses to small random filters, averaged over the quadrants of the image: 8 features for each filter.

    The filters are whitened patches of synthetic "dead leaves" images, overlapping discs of random sizes and colours,
    whose edges are distributed as in photographs. Responses pass a threshold in both directions. Sides longer than 32
    pixels are reduced to 32 first, and sides shorter than a patch are enlarged.
    """

    filters: int = 125
    patch: int = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("filters", 1 <= self.filters <= MOST_FEATURES // 8, must=f"in [1, {MOST_FEATURES // 8}]")
        self._require("patch", 2 <= self.patch <= 16, must="in [2, 16]")

    def make(self, shape: tuple[int, ...], pretrained: Callable[[], nn.Module]) -> nn.Module:
        """Return the module that computes the features."""
        most_channels = MOST_FILTER_VALUES // self.patch**2
        if len(shape) != 3 or shape[0] > most_channels:
            raise ValueError(
                f"{self} needs images (channels, height, width) of at most {most_channels} channels, got {shape}; "
                "use RandomReLU"
            )
        return _PatchFeatures(shape[0], self.filters, self.patch)


@setting
@dataclass(frozen=True)
class Pretrained(NumericSettings):
    """The features of the backbone as it came, before any task was learned: for pretrained weights.

    The model file keeps a copy of these weights. The features' signed square roots are scaled to unit length.
    """

    def make(self, shape: tuple[int, ...], pretrained: Callable[[], nn.Module]) -> nn.Module:
        """Return the module that computes the features."""
        return _PretrainedFeatures(pretrained(), shape)


@setting
@dataclass(frozen=True)
class Joined(NumericSettings):
    """The features of up to four spaces side by side, as they are.

    `LDA` shrinks all variances towards their mean, so a space whose features have much smaller variances than those of
    the others has little influence.
    """

    spaces: tuple[Space, ...]

    def __post_init__(self) -> None:
        is_sequence = isinstance(self.spaces, tuple | list)
        if not is_sequence or not all(map(_can_be_joined, self.spaces)) or not 1 <= len(self.spaces) <= MOST_SPACES:
            raise ValueError(
                f"spaces of Joined must be a tuple of at most {MOST_SPACES} spaces such as RandomReLU(), none of them "
                f"Joined, got {self.spaces!r}"
            )
        object.__setattr__(self, "spaces", tuple(self.spaces))

    def make(self, shape: tuple[int, ...], pretrained: Callable[[], nn.Module]) -> nn.Module:
        """Return the module that computes the features."""
        return _JoinedFeatures([space.make(shape, pretrained) for space in self.spaces])


@dataclass(frozen=True)
class Flipped:
    """The features of mirror images in a space, or in the default one: learning may add them to its sums."""

    space: Space | None

    def make(self, shape: tuple[int, ...], pretrained: Callable[[], nn.Module]) -> nn.Module:
        """Return the module that computes the features."""
        if len(shape) != 3:
            raise ValueError(f"only images (channels, height, width) have mirror images, got inputs {shape}")
        return _FlippedFeatures((self.space or default_space(shape)).make(shape, pretrained))


def _can_be_joined(space: object) -> bool:
    return hasattr(space, "make") and not isinstance(space, Joined | type)


def default_space(shape: tuple[int, ...]) -> Space:
    """Return the space for inputs of this shape, without a pretrained network."""
    patches = RandomPatches()
    is_image = len(shape) == 3 and shape[0] * patches.patch**2 <= MOST_FILTER_VALUES
    return patches if is_image and min(shape[1:]) > TINY_IMAGE else RandomReLU()


def root_normalize(features: Tensor) -> Tensor:
    """Return signed square roots of features (..., d), scaled to unit length: closer to a normal distribution."""
    return F.normalize(features.sign() * features.abs().sqrt(), dim=-1)


def _resize(images: Tensor, height: int, width: int) -> Tensor:
    """Average or repeat the pixels of images (N, channels, height, width) so that they have this size."""
    return images if images.shape[-2:] == (height, width) else F.adaptive_avg_pool2d(images, (height, width))


class _RandomReLUFeatures(nn.Module):
    weights: Tensor

    def __init__(self, shape: tuple[int, ...], size: int):
        super().__init__()
        self.shape = _reduced_shape(shape)
        self.values = min(math.prod(self.shape), MOST_VALUES)
        weights = torch.empty(self.values, size, dtype=torch.float32)
        draw = np.random.RandomState(0)  # a legacy generator, whose numbers are the same in all versions of numpy
        for row in weights:
            row.copy_(torch.from_numpy(draw.randn(size) / self.values**0.5))
        self.register_buffer("weights", weights)

    def forward(self, pixels: Tensor) -> Tensor:
        pixels = pixels.to(self.weights.dtype)
        if pixels.ndim > 2:
            images = pixels[:, None].flatten(1, -3)  # (N, product of other axes, height, width)
            pixels = _resize(images, *self.shape[-2:])
        values = pixels[:, None].flatten(1)
        if values.shape[1] != self.values:
            values = F.adaptive_avg_pool1d(values, self.values)
        return F.relu(values @ self.weights)


def _reduced_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that inputs are averaged to: images at most 16 x 16, and at most `MOST_VALUES` if possible."""
    is_large_image = len(shape) == 3 and min(shape[1:]) > TINY_IMAGE
    sides = [shape[0], TINY_IMAGE, TINY_IMAGE] if is_large_image else list(shape)
    while math.prod(sides) > MOST_VALUES and max(sides[-2:]) > 1:
        longer = max(range(len(sides))[-2:], key=sides.__getitem__)
        sides[longer] = (sides[longer] + 1) // 2
    return tuple(sides)


class _PatchFeatures(nn.Module):
    """Softly thresholded responses of standardised patches, averaged over quadrants."""

    filters: Tensor
    mean_filter: Tensor

    CONTRAST = 0.16  # added to the contrast of patches, as a share of the contrast of the image
    THRESHOLD = 0.5

    def __init__(self, channels: int, filters: int, patch: int):
        super().__init__()
        self.patch = patch
        self.register_buffer("filters", patch_filters(channels, filters, patch).clone())
        self.register_buffer("mean_filter", torch.full_like(self.filters[:1], 1 / (channels * patch**2)))

    def forward(self, pixels: Tensor) -> Tensor:
        height, width = (min(max(side, self.patch), LARGEST_SIDE) for side in pixels.shape[-2:])
        # A graph must work with batches of any size, so it cannot be split into a fixed number of parts.
        if torch.compiler.is_compiling():
            return self._features(pixels, height, width)
        positions = (height - self.patch + 1) * (width - self.patch + 1)
        numbers = RESPONSES_AT_ONCE["cpu" if pixels.device.type == "cpu" else "other"]
        parts = pixels.split(max(1, numbers // (positions * len(self.filters))))
        return torch.cat([self._features(part, height, width) for part in parts])

    def _features(self, pixels: Tensor, height: int, width: int) -> Tensor:
        pixels = _resize(pixels.to(self.filters.dtype), height, width)
        pixels = pixels - pixels.mean(dim=(1, 2, 3), keepdim=True)
        pixels = pixels / (pixels.pow(2).mean(dim=(1, 2, 3), keepdim=True).sqrt() + 1e-3)
        mean, square = F.conv2d(pixels, self.mean_filter), F.conv2d(pixels.pow(2), self.mean_filter)
        contrast = ((square - mean.pow(2)).clamp(min=0) + self.CONTRAST**2).sqrt()
        responses = F.softshrink(F.conv2d(pixels, self.filters) / contrast, self.THRESHOLD)
        # The mean and the mean absolute response carry the same as the positive and the negative part.
        both = [F.adaptive_avg_pool2d(values, 2).flatten(1) for values in (responses, responses.abs())]
        return torch.cat(both, dim=1)


class _PretrainedFeatures(nn.Module):
    """Features of the backbone; those of photos in bfloat16 on a CPU that is fast in it. `shape` is that of images."""

    def __init__(self, backbone: nn.Module, shape: tuple[int, ...]):
        super().__init__()
        self.backbone, self.shape = backbone, shape

    def forward(self, pixels: Tensor) -> Tensor:
        with fast_photos(pixels.device, self.shape):
            if pixels.ndim == 4 and torch.is_autocast_enabled(pixels.device.type):
                pixels = pixels.contiguous(memory_format=torch.channels_last)
            return root_normalize(self.backbone(pixels).float())


class _FlippedFeatures(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, pixels: Tensor) -> Tensor:
        return self.inner(pixels.flip(-1))


class _JoinedFeatures(nn.Module):
    def __init__(self, parts: list[nn.Module]):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, pixels: Tensor) -> Tensor:
        return torch.cat([part(pixels) for part in self.parts], dim=1)


@lru_cache(maxsize=8)
def patch_filters(channels: int, filters: int, patch: int) -> Tensor:
    """Return filters (filters, channels, patch, patch) with mean 0 for standardised patches."""
    draw = np.random.RandomState(0)
    leaves = _blur(_dead_leaves(draw, channels))
    sample = _standardize(_random_patches(leaves, 20000, patch, draw))
    eigenvalues, axes = np.linalg.eigh(sample.T @ sample / len(sample))
    whitening = (axes / np.sqrt(eigenvalues.clip(min=0) + 0.1)) @ axes.T
    candidates = _random_patches(leaves, 8 * filters, patch, draw)
    contrasts = candidates.std(axis=1)
    kept = _standardize(candidates[np.argsort(contrasts < 0.05, kind="stable")][:filters])  # flat patches come last
    whitened = kept @ whitening
    whitened /= np.linalg.norm(whitened, axis=1, keepdims=True).clip(min=1e-9)
    weights = whitened @ whitening
    weights -= weights.mean(axis=1, keepdims=True)
    return torch.from_numpy(weights.reshape(filters, channels, patch, patch)).float()


def _dead_leaves(
    draw: np.random.RandomState, channels: int, *, images: int = 48, size: int = 64, discs: int = 400
) -> np.ndarray:
    """Return images (images, channels, size, size) of discs that cover one another, with radii from 1 to 24 pixels."""
    rows, columns = np.mgrid[:size, :size]
    drawn = np.zeros((images, channels, size, size))
    for image in drawn:
        radii = (24.0**-2 + draw.rand(discs) * (1 - 24.0**-2)) ** -0.5  # a power law: small discs are more frequent
        centres = draw.rand(discs, 2) * size
        colours = draw.rand(discs, 1) + 0.2 * draw.randn(discs, channels)
        for centre, radius, colour in zip(centres, radii, colours, strict=True):
            # Only the square around a disc is looked at, which is much smaller than the image for most discs.
            box = tuple(slice(max(0, int(at - radius)), int(at + radius) + 2) for at in centre)
            inside = (rows[box] - centre[0]) ** 2 + (columns[box] - centre[1]) ** 2 < radius**2
            image[:, *box][:, inside] = colour[:, None]
    return drawn


def _blur(images: np.ndarray) -> np.ndarray:
    """Return images whose pixels are averaged with their neighbours, with weights 1, 2, 1 in both directions."""
    for axis in (2, 3):
        images = (2 * images + np.roll(images, 1, axis) + np.roll(images, -1, axis)) / 4
    return images


def _random_patches(images: np.ndarray, number: int, patch: int, draw: np.random.RandomState) -> np.ndarray:
    """Return patches (number, channels * patch * patch) from random places."""
    places = images.shape[-1] - patch + 1
    image, (row, column) = draw.randint(len(images), size=number), draw.randint(places, size=(2, number))
    windows = np.lib.stride_tricks.sliding_window_view(images, (patch, patch), axis=(2, 3))
    return windows[image, :, row, column].reshape(number, -1)


def _standardize(patches: np.ndarray) -> np.ndarray:
    """Return patches with mean 0 and variance 1, or less where there is little contrast."""
    centred = patches - patches.mean(axis=1, keepdims=True)
    return centred / np.sqrt(centred.var(axis=1, keepdims=True) + 0.04**2)
