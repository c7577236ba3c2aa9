"""Examples: a task's images and labels, whatever form they come in.

A pair (images, labels) of tensors or arrays stays one tensor on the device; a torch `Dataset` is read anew
in each epoch, so augmentation inside it works. Both give batches by index, so the order of the examples is
decided in one place (`training.py`) and is the same for one process and for many.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from cps.data.images import as_images
from cps.storage.container import digest

ClassName = str | int
Data = Any  # a torch Dataset, or a pair (images, labels) of tensors, arrays or lists
ToLocal = Callable[[Sequence[ClassName]], Tensor]

log = logging.getLogger(__name__)


class Examples(Protocol):
    """Images with local labels (0 to the task's number of classes - 1), read in batches by index."""

    def __len__(self) -> int: ...

    def batches(self, order: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (images, labels) for each tensor of indices in `order`."""
        ...

    def labels(self) -> Tensor | None:
        """Return all labels, or None where only reading every image would tell them."""
        ...

    def digest(self) -> str | None:
        """Return a digest of what can be told without reading every image, or None where that is nothing."""
        ...

    def to(self, device: torch.device) -> "Examples":
        """Return the same examples with what is in memory moved to the device."""
        ...


@dataclass(frozen=True)
class TensorExamples:
    """Examples held as one tensor of images and one of local labels; if `on_host`, too large for the GPU in use."""

    images: Tensor
    targets: Tensor
    on_host: bool = False

    def __len__(self) -> int:
        return len(self.images)

    def batches(self, order: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (images, labels) for each tensor of indices in `order`."""
        order = list(order)
        together = torch.cat(order).to(self.images.device)
        for indices in together.split([len(indices) for indices in order]):
            yield self._read(indices), self.targets[indices]

    def labels(self) -> Tensor:
        """Return all labels."""
        return self.targets

    def digest(self) -> str:
        """Return a digest of all images and labels."""
        return digest({"images": self.images, "targets": self.targets})

    def to(self, device: torch.device) -> "TensorExamples":
        """Return the same examples on the device, or in the host's memory where they do not fit."""
        if self.images.device == device or self.on_host:
            return self
        if device.type == "cuda" and not _fits(self.images.nbytes, device):
            size = self.images.nbytes / 2**30
            log.warning("%.1f GiB of images do not fit on the GPU; they stay in the host's memory", size)
            return TensorExamples(self.images, self.targets, on_host=True)
        return TensorExamples(self.images.to(device), self.targets.to(device))

    def _read(self, indices: Tensor) -> Tensor:
        if not self.on_host:
            return self.images[indices]
        # Pinned, so that the GPU fetches it while the next one is read.
        batch = torch.empty(len(indices), *self.images.shape[1:], dtype=self.images.dtype, pin_memory=True)
        return torch.index_select(self.images, 0, indices, out=batch)


@dataclass(frozen=True)
class DatasetExamples:
    """Examples read from a torch `Dataset`, by `workers` background processes."""

    dataset: Dataset
    to_local: ToLocal
    workers: int = 0

    def __len__(self) -> int:
        return len(self.dataset)  # pyright: ignore[reportArgumentType]

    def batches(self, order: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (images, labels) for each tensor of indices in `order`."""
        loader = DataLoader(
            self.dataset,
            batch_sampler=[indices.tolist() for indices in order],
            num_workers=self.workers,
            collate_fn=_collate,
        )
        for images, labels in loader:
            yield images, self.to_local(labels)

    def labels(self) -> Tensor | None:
        """Return all labels where the data set tells them without reading images."""
        known = known_labels(self.dataset)
        return None if known is None else self.to_local(known)

    def digest(self) -> str | None:
        """Return a digest of the labels, where they are known; that of the images would take reading each."""
        known = self.labels()
        return None if known is None else digest({"targets": known})

    def to(self, device: torch.device) -> "DatasetExamples":
        """Return itself: images are moved batch by batch."""
        return self


@dataclass(frozen=True)
class ImageBatches:
    """The images of some examples in their order, batch by batch, as often as they are iterated over.

    `mirrored`: left to right. `part` of `parts`: one of so many stretches of them.
    """

    examples: Examples
    batch_size: int = 256
    flipped: bool = False
    part: int = 0
    parts: int = 1

    def __iter__(self) -> Iterator[Tensor]:
        mine = torch.arange(len(self.examples)).tensor_split(self.parts)[self.part]
        for images, _ in self.examples.batches(mine.split(self.batch_size)):
            yield images.flip(-1) if self.flipped else images


def all_labels(examples: Examples) -> Tensor:
    """Return all labels, reading every image where there is no other way."""
    known = examples.labels()
    return torch.cat([labels for _, labels in in_order(examples)]) if known is None else known


def in_order(examples: Examples, batch_size: int = 256) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield all (images, labels) in their order, batch by batch."""
    return examples.batches(torch.arange(len(examples)).split(batch_size))


def as_examples(data: Data, to_local: ToLocal, *, workers: int = 0) -> Examples:
    """Return the examples in a torch `Dataset` or a pair (images, labels), with labels made local."""
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        data = data.tensors
    elif isinstance(data, Dataset):
        data = _read_at_once(data) or data
    if isinstance(data, (tuple, list)) and len(data) == 2:
        images, labels = data[0], plain_labels(data[1])
        images = as_images(images)
        if len(images) != len(labels):
            raise ValueError(f"expected one label per image, got {len(images)} images, {len(labels)} labels")
        examples = TensorExamples(images, to_local(labels).to(images.device))
    elif isinstance(data, Dataset) and hasattr(data, "__len__"):
        examples = DatasetExamples(data, to_local, workers)
    else:
        raise TypeError(
            f"a task's data is a torch Dataset with a length or a pair (images, labels), got {type(data).__name__}"
        )
    if len(examples) == 0:
        raise ValueError("the task has no images")
    return examples


def _read_at_once(dataset: Dataset) -> Data | None:
    """Return all images and labels of a data set that can `read` many at once, if they fit in memory."""
    whole = dataset.dataset if isinstance(dataset, Subset) else dataset
    if not (hasattr(whole, "read") and hasattr(whole, "bytes_each")):
        return None
    indices = dataset.indices if isinstance(dataset, Subset) else range(len(dataset))  # pyright: ignore
    size = len(indices) * whole.bytes_each  # pyright: ignore[reportAttributeAccessIssue]
    if size > free_memory() // 2:
        log.warning("%.1f GiB of images do not fit in memory; they are decoded anew in each epoch", size / 2**30)
        return None
    found = whole.read(indices)  # pyright: ignore[reportAttributeAccessIssue]
    for error in found.skipped:
        log.warning("skipped: %s", error)
    return found.images, found.labels


def free_memory() -> int:
    """Return the bytes of memory that are free, as far as the system tells."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 8 * 2**30


def plain_labels(labels: Any) -> list[ClassName]:
    """Return labels as a list of ints and strings."""
    if getattr(labels, "ndim", 1) != 1:
        raise ValueError(f"labels are one class for each image, got shape {tuple(labels.shape)}")
    if not hasattr(labels, "__iter__"):
        raise TypeError(f"labels and classes are lists of names or numbers, got {labels!r}")
    return [_plain_label(label) for label in (labels.tolist() if hasattr(labels, "tolist") else labels)]


def known_labels(dataset: Dataset) -> list[ClassName] | None:
    """Return the labels of a data set that has them as `targets`, as torchvision's have; else None."""
    if isinstance(dataset, Subset):
        known = known_labels(dataset.dataset)
        return None if known is None else [known[index] for index in dataset.indices]
    targets = getattr(dataset, "targets", None)
    if targets is None:
        return None
    transform = getattr(dataset, "target_transform", None)
    return plain_labels(targets if transform is None else [transform(target) for target in plain_labels(targets)])


def _fits(size: int, device: torch.device) -> bool:
    """Say whether so many bytes, which are needed twice, leave half of the memory that a GPU has to training."""
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return size <= (free + unused) // 4


def _plain_label(label: Any) -> Any:
    return label.item() if isinstance(label, (Tensor, np.generic)) else label


def _collate(items: list[tuple[Any, Any]]) -> tuple[Tensor, list[ClassName]]:
    return as_images([item[0] for item in items]), plain_labels([item[1] for item in items])
