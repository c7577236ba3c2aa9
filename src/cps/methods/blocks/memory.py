"""A memory of old images: a few of each class, chosen when its task has been learned."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cps.data.examples import Examples, TensorExamples, read_labels
from cps.storage.settings_codec import NumericSettings, setting


class Choice(Protocol):
    """Chooses images of a class."""

    needs_features: bool

    def __call__(self, features: Tensor, number: int, draws: torch.Generator) -> Tensor:
        """Return the indices of `number` images with these features (N, d), the best ones first."""
        ...


@setting
@dataclass(frozen=True)
class Herding:
    """The images whose mean feature is closest to that of the class, one after the other (iCaRL, algorithm 4).

    Features have unit length, and any first part of the order is a good choice of fewer images.
    """

    needs_features = True

    def __call__(self, features: Tensor, number: int, draws: torch.Generator) -> Tensor:
        """Return the indices of the images in the order in which they are chosen."""
        points = F.normalize(features.double(), dim=1)
        mean, total = points.mean(dim=0), torch.zeros_like(points[0])
        chosen: list[int] = []
        for count in range(1, min(number, len(points)) + 1):
            distances = (mean - (total + points) / count).norm(dim=1)
            distances[chosen] = torch.inf
            best = int(distances.argmin())
            chosen.append(best)
            total = total + points[best]
        return torch.tensor(chosen, dtype=torch.long)


@setting
@dataclass(frozen=True)
class RandomImages:
    """Images at random."""

    needs_features = False

    def __call__(self, features: Tensor, number: int, draws: torch.Generator) -> Tensor:
        """Return random indices."""
        return torch.randperm(len(features), generator=draws)[:number]


@setting
@dataclass(frozen=True)
class FirstImages:
    """The first images, in the order of the data."""

    needs_features = False

    def __call__(self, features: Tensor, number: int, draws: torch.Generator) -> Tensor:
        """Return the first indices."""
        return torch.arange(min(number, len(features)))


@setting
@dataclass(frozen=True)
class Memory(NumericSettings):
    """How many images are kept: `total` for all classes together, or `per_class`; and which.

    With `total`, every class has total // classes images, so the memory of old classes shrinks with every task.
    """

    total: int | None = 2000
    per_class: int | None = None
    choose: Choice = field(default_factory=Herding)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.per_class is not None and self.total not in (None, 2000):
            raise ValueError("a memory has either a total number of images or a number per class; pass one of them")
        if self.per_class is not None:
            object.__setattr__(self, "total", None)
        for name in ("total", "per_class"):
            value = getattr(self, name)
            is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            self._require(name, value is None or is_number, must="an integer, 0 or more, or None")
        if self.total is None and self.per_class is None:
            raise ValueError("a memory needs a total number of images or a number per class; pass one of them")

    def quota(self, classes: int) -> int:
        """Return the number of images of each class if there are `classes` classes.

        Raise `ValueError` if the memory cannot hold an image of each; a memory of 0 images holds none.
        """
        if self.per_class is not None:
            return self.per_class
        total = self.total or 0
        if 0 < total < classes:
            raise ValueError(
                f"a memory of {total} images cannot hold one of each of {classes} classes; use a larger one"
            )
        return total // classes


class Exemplars:
    """The images in a memory, by class, each class in the order in which its images were chosen."""

    def __init__(self) -> None:
        self.images: list[Tensor] = []

    def __len__(self) -> int:
        return sum(map(len, self.images))

    @property
    def nbytes(self) -> int:
        """The bytes of all images."""
        return sum(images.nbytes for images in self.images)

    def first(self, classes: int) -> "Exemplars":
        """Return the images of the first classes."""
        part = Exemplars()
        part.images = self.images[:classes]
        return part

    def shrink(self, quota: int) -> None:
        """Keep the first images of each class."""
        self.images = [images[:quota].clone() if len(images) > quota else images for images in self.images]

    def add_classes(
        self,
        examples: Examples,
        classes: Sequence[int],
        quota: int,
        choose: Choice,
        features: Callable[[], Tensor],
        draws: torch.Generator,
    ) -> None:
        """Choose images of new classes, given as labels, from examples whose `features()` may be needed."""
        labels = read_labels(examples).cpu()
        known = features().cpu() if choose.needs_features and quota else torch.empty(len(labels), 0)
        for label in classes:
            own = (labels == label).nonzero()[:, 0]
            chosen = own[choose(known[own], quota, draws)]
            self.images.append(_read_images(examples, chosen))

    def examples(self) -> TensorExamples | None:
        """Return all images with their classes as labels, or None if there are none."""
        if not len(self):
            return None
        labels = torch.arange(len(self.images)).repeat_interleave(torch.tensor([len(each) for each in self.images]))
        return TensorExamples(torch.cat(self.images), labels)

    def state(self) -> dict[str, Tensor]:
        """Return the images by class."""
        return {str(label): images for label, images in enumerate(self.images)}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take over what `state` returned."""
        self.images = [state[str(label)] for label in range(len(state))]


def _read_images(examples: Examples, indices: Tensor) -> Tensor:
    """Return some of the images, on the CPU."""
    if not len(indices):
        return next(examples.batches([torch.arange(1)]))[0][:0].cpu()
    return torch.cat([images.cpu() for images, _ in examples.batches(indices.split(256))])
