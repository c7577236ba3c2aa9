"""Maps of a task's images, computed once: what is trained on behind a trunk.

The trunk does not change, so its outputs for the images, and for some augmented copies of each, can be kept while the
task is learned. Each epoch trains on a random one of the copies.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cps.data.augmentation import Augmentation
from cps.data.batch_transform import BatchTransform
from cps.data.examples import Examples, TensorExamples
from cps.data.normalize import Prepare
from cps.network.shared import SharedNetwork
from cps.network.trunk import Maps
from cps.runtime.devices import gather_rows

if TYPE_CHECKING:
    from lightning_fabric import Fabric

MOST_BYTES = 2**32  # of the maps of a task
BATCH = 64  # images that pass the trunk at a time


@dataclass(frozen=True)
class MapExamples(TensorExamples):
    """Examples whose images have passed the trunk already."""

    def _read(self, indices: Tensor) -> Maps:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Maps(super()._read(indices))


@dataclass(frozen=True)
class RandomCopy:
    """Take a random one of the copies of each image: (N, copies, ...) -> (N, ...)."""

    @property
    def draws(self) -> int:
        """The number of random numbers per image."""
        return 1

    def __call__(self, images: Tensor, uniform: Tensor) -> Tensor:
        """Return one copy of each image."""
        copies = (uniform[:, 0] * images.shape[1]).long()
        return images[torch.arange(len(images), device=images.device), copies]


@dataclass(frozen=True)
class CachedMaps:
    """Maps (N, copies, ...) of a task's images, of which the first copy is the image itself, and their labels."""

    values: Tensor
    labels: Tensor
    dtype: torch.dtype

    @property
    def examples(self) -> TensorExamples:
        """All copies of all images, for training with `transform`."""
        return TensorExamples(self.values, self.labels)

    @property
    def transform(self) -> BatchTransform:
        """The transform of a batch of `examples`."""
        return BatchTransform(Prepare(dtype=self.dtype), RandomCopy())

    @property
    def plain(self) -> MapExamples:
        """The images without augmentation."""
        return MapExamples(self.values[:, 0], self.labels)


def cache_maps(
    network: SharedNetwork,
    examples: Examples,
    augment: Augmentation | None,
    copies: int,
    generator: torch.Generator,
    fabric: "Fabric",
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> CachedMaps:
    """Return the maps of examples and of `copies - 1` augmented copies of each, fewer if they take too much memory.

    Without augmentation there is one copy. Each process computes a part of the images, and all receive all maps.
    `on_progress` is called with the number of maps that are done, and the total.
    """
    number = len(examples)
    first, _ = next(examples.batches([torch.arange(1)]))
    size = network.maps(first).values.nbytes * number
    if size > MOST_BYTES:
        raise ValueError(
            f"the outputs of the trunk for {number:,} images take {size / 2**30:.1f} GiB, more than "
            f"{MOST_BYTES / 2**30:.0f}; learn fewer images at a time, or use learn_frozen"
        )
    copies = 1 if augment is None else min(copies, MOST_BYTES // size)
    draws = 0 if augment is None else augment.draws
    uniform = torch.rand(number, copies - 1, draws, generator=generator)
    order = torch.arange(number).tensor_split(fabric.world_size)[fabric.global_rank].split(BATCH)
    values, labels = [], []
    for indices, (images, targets) in zip(order, examples.batches(order), strict=True):
        numbers = uniform[indices].to(images.device).unbind(dim=1)
        views = [images, *(augment(images, row) for row in numbers)] if augment is not None else [images]
        values.append(torch.stack([network.maps(view).values for view in views], dim=1))
        labels.append(targets.to(network.device))
        if on_progress is not None:
            on_progress(copies * sum(map(len, values)), copies * sum(map(len, order)))
    maps, targets = torch.cat(values), torch.cat(labels)
    if fabric.world_size > 1:
        maps, targets = gather_rows(maps, fabric), gather_rows(targets, fabric)
    return CachedMaps(maps, targets, network.prepare.dtype)
