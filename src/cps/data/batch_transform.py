"""Presentation: how a batch of raw images is shown to a network that learns."""

from dataclasses import dataclass, field

from torch import Tensor

from cps.data.augmentation import Augmentation
from cps.data.normalize import Prepare
from cps.data.rotations import RotationScheme, Upright


@dataclass(frozen=True)
class BatchTransform:
    """Raw images and labels -> pixels and the head's outputs: augmented, turned, scaled and normalised."""

    prepare: Prepare = field(default_factory=Prepare)
    augment: Augmentation | None = None
    rotations: RotationScheme = field(default_factory=Upright)

    def __post_init__(self) -> None:
        if self.augment is not None and not hasattr(self.augment, "draws"):
            raise TypeError(
                "an augmentation is a function of images and random numbers (N, draws) from 0 to 1, with an attribute "
                f"`draws`; {self.augment!r} has none"
            )

    @property
    def draws(self) -> int:
        """How many random numbers each image needs."""
        return (self.augment.draws if self.augment else 0) + self.rotations.draws

    def __call__(self, images: Tensor, labels: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Return pixels and labels, by a row of random numbers for each image."""
        for_augmentation = uniform[:, : uniform.shape[1] - self.rotations.draws]
        for_views = uniform[:, uniform.shape[1] - self.rotations.draws :]
        if self.augment is not None:
            images = self.augment(images, for_augmentation)
        images, labels = self.rotations(images, labels, for_views)
        return self.prepare(images), labels
