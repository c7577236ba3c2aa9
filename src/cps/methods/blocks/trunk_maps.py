"""A frozen trunk for methods with one head: images pass it once, and training sees what comes out, the maps.

An image and its augmented copies have the same maps whenever they are computed, since the random numbers of the copies
depend on the seed and on the pixels of the image. So a memory keeps images, not maps, and a task that was interrupted
resumes with the same bits.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from cps.data.augmentation import Augmentation
from cps.data.batch_transform import BatchTransform
from cps.data.examples import Examples, iterate_batches
from cps.data.normalize import Prepare
from cps.network.partition import as_channels_last, make_contiguous, named_tensors
from cps.runtime.devices import fast_photos, full_precision
from cps.runtime.seeding import generator
from cps.storage import container
from cps.training.cached_maps import MOST_BYTES, RandomCopy

Key = bytes  # digest of the pixels of an image


class TrunkMaps:
    """Runs images through a trunk, and keeps the maps of those that are trained on.

    `prepare` scales and normalises raw images. Each image gets `copies - 1` augmented copies, if there is an
    augmentation.
    """

    def __init__(
        self,
        trunk: nn.Module,
        prepare: Callable[[Tensor], Tensor],
        augment: Augmentation | None,
        copies: int,
        seed: int,
        device: torch.device,
    ):
        make_contiguous(trunk)
        self.trunk, self.prepare, self.augment = trunk.to(device), prepare, augment
        self.copies, self.seed, self.device = copies if augment is not None else 1, seed, device
        self._maps: dict[Key, Tensor] = {}  # (copies, ...) of an image, the first of which is the image itself

    @property
    def nbytes(self) -> int:
        """The bytes of the trunk."""
        return sum(value.nbytes for value in named_tensors(self.trunk).values())

    @cached_property
    def digest(self) -> str:
        """A digest of the weights of the trunk."""
        return container.digest(named_tensors(self.trunk))

    def __call__(self, images: Tensor) -> Tensor:
        """Return the maps (N, ...) of raw images."""
        return self._run(images).float()

    def examples(self, examples: Examples, on_progress: Callable[[int, int], None] | None = None) -> "MapExamples":
        """Return the maps of raw images and of their copies; those of images that are known are not computed again.

        `on_progress` is called with the number of images that are done, and the total.
        """
        keys: list[Key] = []
        labels = []
        for images, targets in iterate_batches(examples, 64):
            known = len(self._maps)
            for image in images:
                keys.append(_key(image))
                if keys[-1] not in self._maps:
                    self._maps[keys[-1]] = self._maps_of(image, keys[-1])
                    self._check_size(len(examples), image)
            labels.append(targets.cpu())
            if len(self._maps) > known and on_progress is not None:
                on_progress(len(keys), len(examples))
        return MapExamples(tuple(keys), torch.cat(labels), self._maps)

    def transform(self, transform: BatchTransform) -> BatchTransform:
        """Return the transform of batches of maps that stands for one of raw images."""
        augment = FirstCopy() if transform.augment is None else RandomCopy()
        return replace(transform, prepare=Prepare(), augment=augment)

    def keep(self, images: Iterable[Tensor]) -> None:
        """Drop the maps of all images but these, given in batches."""
        kept = {_key(image) for batch in images for image in batch}
        self._maps = {key: maps for key, maps in self._maps.items() if key in kept}

    @torch.no_grad()
    def _run(self, images: Tensor) -> Tensor:
        """Return the maps of raw images in the type that the trunk computes in: on a CPU it may be bfloat16."""
        with full_precision(), fast_photos(self.device, images.shape[1:]):
            return self.trunk(as_channels_last(self.prepare(images.to(self.device))))

    def _maps_of(self, image: Tensor, key: Key) -> Tensor:
        """Return the maps of an image and of its copies; together, so that they do not depend on other images."""
        views = image[None]
        if self.augment is not None and self.copies > 1:
            draws = generator(self.seed, int.from_bytes(key[:8], "little"))
            uniform = torch.rand(self.copies - 1, self.augment.draws, generator=draws).to(image.device)
            views = torch.cat([views, self.augment(views.expand(self.copies - 1, *image.shape), uniform)])
        return self._run(views).cpu()

    def _check_size(self, images: int, image: Tensor) -> None:
        size = next(iter(self._maps.values())).nbytes
        if size * images > MOST_BYTES:
            raise ValueError(
                f"the maps of {images:,} images of shape {tuple(image.shape)} take {size * images / 2**30:.1f} GiB, "
                f"more than {MOST_BYTES / 2**30:.0f}; use fewer map_copies, or a trunk that ends later"
            )


def _key(image: Tensor) -> Key:
    """Return a digest of the pixels of an image."""
    return hashlib.blake2b(image.cpu().contiguous().numpy().tobytes(), digest_size=16).digest()


@dataclass(frozen=True)
class MapExamples:
    """Maps (N, copies, ...) of images, and their labels."""

    keys: tuple[Key, ...]
    targets: Tensor
    maps: Mapping[Key, Tensor]

    def __len__(self) -> int:
        return len(self.keys)

    def batches(self, order: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (maps, labels) for each tensor of indices in `order`."""
        for indices in order:
            indices = indices.cpu()
            yield torch.stack([self.maps[self.keys[index]] for index in indices.tolist()]), self.targets[indices]

    def labels(self) -> Tensor:
        """Return all labels."""
        return self.targets

    def digest(self) -> str:
        """Return a digest of the images and their labels."""
        labels = self.targets.numpy().tobytes()
        return hashlib.sha256(b"".join(self.keys) + labels).hexdigest()

    def to(self, device: torch.device) -> "MapExamples":
        """Return itself: maps are moved batch by batch."""
        return self


@dataclass(frozen=True)
class FirstCopy:
    """Take the image itself, the first of the copies: (N, copies, ...) -> (N, ...)."""

    draws = 0

    def __call__(self, images: Tensor, uniform: Tensor) -> Tensor:
        """Return the first copy of each image."""
        return images[:, 0]
