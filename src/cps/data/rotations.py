"""Views: the same image turned by quarters and mirrored.

In training each turn of a class may be learned as a class of its own: a network that must tell the turns apart knows
more about its images, and so about what is not one of them. At test the outputs for all looks at an image are averaged.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cps.storage.settings_codec import Numbers, setting


class Look(NamedTuple):
    """One look at an image: turned by so many quarters, and perhaps mirrored before."""

    turn: int
    is_mirrored: bool

    def __call__(self, images: Tensor) -> Tensor:
        """Return images (N, channels, height, width) as they look, in memory of their own."""
        seen = images.flip(-1) if self.is_mirrored else images
        if self.turn:
            return torch.rot90(seen, self.turn, dims=(2, 3))
        return seen if self.is_mirrored else seen.clone()


class Views(Protocol):
    """How images are turned in training. A head has `turns` outputs for each class: class 0 turned by 0, by 1, ..."""

    @property
    def turns(self) -> int:
        """How many turns a class is learned in: 1 or 4."""
        ...

    @property
    def mirrors(self) -> bool:
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
class Upright(Numbers):
    """Images are shown as they are."""

    mirrors: bool = False

    @property
    def turns(self) -> int:
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
class Rotations(Numbers):
    """Each class is learned in four turns: an image is shown in one of them, drawn at random, or in all at once."""

    at_once: bool = False
    mirrors: bool = False

    @property
    def turns(self) -> int:
        """How many turns a class is learned in."""
        return 4

    @property
    def draws(self) -> int:
        """How many random numbers each image needs."""
        return 0 if self.at_once else 1

    def __call__(self, images: Tensor, labels: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Return turned images and the output for each class and turn."""
        every = torch.stack([Look(turn, False)(images) for turn in range(4)])  # (turns, images, ...)
        if self.at_once:
            turns = torch.arange(4, device=labels.device)[:, None]
            return every.flatten(0, 1), (labels * 4 + turns).flatten()
        turn = (uniform[:, 0] * 4).long()
        return every[turn, torch.arange(len(images), device=images.device)], labels * 4 + turn


def looks_at(turns: int, mirrors: bool) -> list[Look]:
    """Return all looks at an image."""
    return [
        Look(turn, is_mirrored) for is_mirrored in ((False, True) if mirrors else (False,)) for turn in range(turns)
    ]


def class_logits(features: Tensor, looks: Sequence[Look], weight: Tensor, bias: Tensor) -> Tensor:
    """Return the logits (N, classes) of images from their features (looks, N, d): of each turn its own outputs."""
    turns = 1 + max(look.turn for look in looks)
    said = [
        F.linear(seen, weight[look.turn :: turns], bias[look.turn :: turns])
        for seen, look in zip(features.unbind(), looks, strict=True)
    ]
    return mean_of(torch.stack(said))


def mean_of(values: Tensor) -> Tensor:
    """Return the mean over the first axis; of a single entry the same bits."""
    return values[0] if len(values) == 1 else values.mean(dim=0)


def check_views(shape: tuple[int, ...], turns: int, mirrors: bool) -> None:
    """Refuse images that cannot be turned or mirrored."""
    if turns not in (1, 4):
        raise ValueError(f"classes are learned in 1 turn or in 4, got {turns}")
    if turns > 1 and (len(shape) != 3 or shape[1] != shape[2]):
        raise ValueError(f"only square images (channels, height, width) can be turned, got {shape}")
    if mirrors and len(shape) != 3:
        raise ValueError(f"only images (channels, height, width) can be mirrored, got {shape}")
