"""Rotations by 90 degrees and flips of the same image.

In training, each rotation of a class may be learned as a separate class (four outputs per class). To tell the rotations
apart, a network must learn more about its images, so it is better at recognising images that are not from its task. At
test time the outputs for all rotations and flips of an image are averaged.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cps.storage.settings_codec import NumericSettings, setting


class View(NamedTuple):
    """An image, flipped or not, then rotated by `rotation` times 90 degrees."""

    rotation: int
    is_flipped: bool

    def __call__(self, images: Tensor) -> Tensor:
        """Return a copy of images (N, channels, height, width) in this view."""
        flipped = images.flip(-1) if self.is_flipped else images
        if self.rotation:
            return torch.rot90(flipped, self.rotation, dims=(2, 3))
        return flipped if self.is_flipped else flipped.clone()


class RotationScheme(Protocol):
    """How images are rotated in training.

    A head has `num_rotations` outputs per class: class 0 rotated by 0, by 90 degrees, ..., then class 1.
    """

    @property
    def num_rotations(self) -> int:
        """The number of rotations in which each class is learned: 1 or 4."""
        ...

    @property
    def flips(self) -> bool:
        """Whether flipped images are evaluated too at test time, which doubles the work."""
        ...

    @property
    def draws(self) -> int:
        """The number of random numbers per image."""
        ...

    def __call__(self, images: Tensor, labels: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Return rotated images and the head's output for each; `uniform` has a row of random numbers per image."""
        ...


@setting
@dataclass(frozen=True)
class Upright(NumericSettings):
    """Images are not rotated."""

    RENAMED: ClassVar = {"mirrors": "flips"}

    flips: bool = False

    @property
    def num_rotations(self) -> int:
        """The number of rotations in which each class is learned."""
        return 1

    @property
    def draws(self) -> int:
        """The number of random numbers per image."""
        return 0

    def __call__(self, images: Tensor, labels: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Return the images and labels unchanged."""
        return images, labels


@setting
@dataclass(frozen=True)
class Rotations(NumericSettings):
    """Each class is learned in four rotations: a step sees one of them, drawn at random, or all four (`at_once`)."""

    RENAMED: ClassVar = {"mirrors": "flips"}

    at_once: bool = False
    flips: bool = False

    @property
    def num_rotations(self) -> int:
        """The number of rotations in which each class is learned."""
        return 4

    @property
    def draws(self) -> int:
        """The number of random numbers per image."""
        return 0 if self.at_once else 1

    def __call__(self, images: Tensor, labels: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Return rotated images and, for each, the output of its class and rotation."""
        rotated = torch.stack([View(rotation, False)(images) for rotation in range(4)])  # (rotations, images, ...)
        if self.at_once:
            rotations = torch.arange(4, device=labels.device)[:, None]
            return rotated.flatten(0, 1), (labels * 4 + rotations).flatten()
        rotation = (uniform[:, 0] * 4).long()
        return rotated[rotation, torch.arange(len(images), device=images.device)], labels * 4 + rotation


def make_views(num_rotations: int, flips: bool) -> list[View]:
    """Return all views of an image."""
    return [
        View(rotation, is_flipped)
        for is_flipped in ((False, True) if flips else (False,))
        for rotation in range(num_rotations)
    ]


def class_logits(features: Tensor, views: Sequence[View], weight: Tensor, bias: Tensor) -> Tensor:
    """Return class logits (N, classes) from features (views, N, d), averaged over the views.

    Each view is read by the outputs of its own rotation.
    """
    num_rotations = 1 + max(view.rotation for view in views)
    logits = [
        F.linear(seen, weight[view.rotation :: num_rotations], bias[view.rotation :: num_rotations])
        for seen, view in zip(features.unbind(), views, strict=True)
    ]
    return average_views(torch.stack(logits))


def average_views(values: Tensor) -> Tensor:
    """Return the mean over the first dimension; the values of a single view are returned bit for bit."""
    return values[0] if len(values) == 1 else values.mean(dim=0)


def check_rotations(shape: tuple[int, ...], num_rotations: int, flips: bool) -> None:
    """Raise `ValueError` if images of this shape cannot be rotated or flipped as asked."""
    if num_rotations not in (1, 4):
        raise ValueError(f"num_rotations must be 1 or 4, got {num_rotations}")
    if num_rotations > 1 and (len(shape) != 3 or shape[1] != shape[2]):
        raise ValueError(f"only square images (channels, height, width) can be rotated, got shape {shape}")
    if flips and len(shape) != 3:
        raise ValueError(f"only images (channels, height, width) can be flipped, got shape {shape}")
