"""Transform a batch of raw images for training."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from cps.data.augmentation import Augmentation
from cps.data.normalize import Prepare
from cps.data.rotations import RotationScheme, Upright


@dataclass(frozen=True)
class BatchTransform:
    """Raw images and labels -> pixels and the head's outputs: augment, rotate, scale and normalise."""

    prepare: Callable[[Tensor], Tensor] = field(default_factory=Prepare)
    augment: Augmentation | None = None
    rotations: RotationScheme = field(default_factory=Upright)

    def __post_init__(self) -> None:
        if self.augment is not None and not hasattr(self.augment, "draws"):
            raise TypeError(
                "an augmentation must be a function of images and random numbers (N, draws) in [0, 1), with an "
                f"attribute `draws`; {self.augment!r} has no such attribute"
            )

    @property
    def draws(self) -> int:
        """The number of random numbers per image."""
        return (self.augment.draws if self.augment else 0) + self.rotations.draws

    def __call__(self, images: Tensor, labels: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Return pixels and the head's output for each; `uniform` has a row of random numbers per image."""
        for_augmentation = uniform[:, : uniform.shape[1] - self.rotations.draws]
        for_rotations = uniform[:, uniform.shape[1] - self.rotations.draws :]
        if self.augment is not None:
            images = self.augment(images, for_augmentation)
        images, labels = self.rotations(images, labels, for_rotations)
        return self.prepare(images), labels
