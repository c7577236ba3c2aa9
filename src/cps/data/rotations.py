"""Views: the same image turned by quarters and mirrored.

In training each turn of a class may be learned as a class of its own: a network that must tell the turns apart knows
more about its images, and so about what is not one of them. At test the outputs for all looks at an image are averaged.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cps.storage.settings_codec import NumericSettings, setting


class View(NamedTuple):
    """One look at an image: turned by so many quarters, and perhaps mirrored before."""

    rotation: int
    is_flipped: bool

    def __call__(self, images: Tensor) -> Tensor:
        """Return images (N, channels, height, width) as they look, in memory of their own."""
        seen = images.flip(-1) if self.is_flipped else images
        if self.rotation:
            return torch.rot90(seen, self.rotation, dims=(2, 3))
        return seen if self.is_flipped else seen.clone()


class RotationScheme(Protocol):
    """How images are turned in training. A head has `turns` outputs for each class: class 0 turned by 0, by 1, ..."""

    @property
    def num_rotations(self) -> int:
        """How many turns a class is learned in: 1 or 4."""
        ...

    @property
    def flips(self) -> bool:
        """Whether at test the mirror image is looked at as well, for twice the work."""
        ...

    @property
    def draws(self) -> int:
        """How many random numbers each image needs."""
        ...

    def __call__(self, images: Tensor, labels: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Return turned images and the head's output for each, by a row of `uniform` for each image."""
        ...


@setting
@dataclass(frozen=True)
class Upright(NumericSettings):
    """Images are shown as they are."""

    RENAMED: ClassVar = {"mirrors": "flips"}

    flips: bool = False

    @property
    def num_rotations(self) -> int:
        """How many turns a class is learned in."""
        return 1

    @property
    def draws(self) -> int:
        """How many random numbers each image needs."""
        return 0

    def __call__(self, images: Tensor, labels: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Return the images and labels as they are."""
        return images, labels


@setting
@dataclass(frozen=True)
class Rotations(NumericSettings):
    """Each class is learned in four turns: an image is shown in one of them, drawn at random, or in all at once."""

    RENAMED: ClassVar = {"mirrors": "flips"}

    at_once: bool = False
    flips: bool = False

    @property
    def num_rotations(self) -> int:
        """How many turns a class is learned in."""
        return 4

    @property
    def draws(self) -> int:
        """How many random numbers each image needs."""
        return 0 if self.at_once else 1

    def __call__(self, images: Tensor, labels: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Return turned images and the output for each class and turn."""
        every = torch.stack([View(turn, False)(images) for turn in range(4)])  # (turns, images, ...)
        if self.at_once:
            num_rotations = torch.arange(4, device=labels.device)[:, None]
            return every.flatten(0, 1), (labels * 4 + num_rotations).flatten()
        turn = (uniform[:, 0] * 4).long()
        return every[turn, torch.arange(len(images), device=images.device)], labels * 4 + turn


def views_of(num_rotations: int, flips: bool) -> list[View]:
    """Return all looks at an image."""
    return [
        View(turn, is_flipped) for is_flipped in ((False, True) if flips else (False,)) for turn in range(num_rotations)
    ]


def class_logits(features: Tensor, views: Sequence[View], weight: Tensor, bias: Tensor) -> Tensor:
    """Return the logits (N, classes) of images from their features (looks, N, d): of each turn its own outputs."""
    num_rotations = 1 + max(view.rotation for view in views)
    said = [
        F.linear(seen, weight[view.rotation :: num_rotations], bias[view.rotation :: num_rotations])
        for seen, view in zip(features.unbind(), views, strict=True)
    ]
    return mean_of(torch.stack(said))


def mean_of(values: Tensor) -> Tensor:
    """Return the mean over the first axis; of a single entry the same bits."""
    return values[0] if len(values) == 1 else values.mean(dim=0)


def check_rotations(shape: tuple[int, ...], num_rotations: int, flips: bool) -> None:
    """Refuse images that cannot be turned or mirrored."""
    if num_rotations not in (1, 4):
        raise ValueError(f"classes are learned in 1 turn or in 4, got {num_rotations}")
    if num_rotations > 1 and (len(shape) != 3 or shape[1] != shape[2]):
        raise ValueError(f"only square images (channels, height, width) can be turned, got {shape}")
    if flips and len(shape) != 3:
        raise ValueError(f"only images (channels, height, width) can be mirrored, got {shape}")
