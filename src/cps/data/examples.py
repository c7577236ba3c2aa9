"""A task's images and labels, in whatever form they are given.

A pair (images, labels) of tensors or arrays stays one tensor on the device. A data set, whose items are pairs, is read
again in each epoch, so that augmentation inside it works. Both are read in batches of indices, so that the order of the
examples is decided in one place, the trainer, and is the same for one process and for many.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset

from cps.data.images import as_images
from cps.data.items import as_dataset, is_dataset, reject_loader
from cps.runtime.environment import free_memory
from cps.storage.container import digest

ClassName = str | int
Data = Any  # a data set with items (image, label), or a pair (images, labels) of tensors, arrays or lists
LabelEncoder = Callable[[Sequence[ClassName]], Tensor]  # class names -> local labels

log = logging.getLogger(__name__)


class Examples(Protocol):
    """Images with local labels (0 to the task's number of classes - 1), read in batches of indices."""

    def __len__(self) -> int: ...

    def batches(self, order: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (images, labels) for each tensor of indices in `order`."""
        ...

    def labels(self) -> Tensor | None:
        """Return all labels, or None if only reading every image would give them."""
        ...

    def digest(self) -> str | None:
        """Return a digest of what is known without reading every image, or None if nothing is."""
        ...

    def to(self, device: torch.device) -> "Examples":
        """Return the same examples, with tensors in memory moved to the device."""
        ...


@dataclass(frozen=True)
class TensorExamples:
    """Examples as one tensor of images and one of local labels; `on_host` if they are too large for the GPU."""

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
        """Return the same examples on the device, or in the host's memory if they do not fit."""
        if self.images.device == device or self.on_host:
            return self
        if device.type == "cuda" and not _fits_on_gpu(self.images.nbytes, device):
            size = self.images.nbytes / 2**30
            log.warning("%.1f GiB of images do not fit on the GPU; they stay in the host's memory", size)
            return TensorExamples(self.images, self.targets, on_host=True)
        return TensorExamples(self.images.to(device), self.targets.to(device))

    def _read(self, indices: Tensor) -> Tensor:
        if not self.on_host:
            return self.images[indices]
        # Pinned memory, so that the GPU copies it while the next batch is read.
        batch = torch.empty(len(indices), *self.images.shape[1:], dtype=self.images.dtype, pin_memory=True)
        return torch.index_select(self.images, 0, indices, out=batch)


@dataclass(frozen=True)
class DatasetExamples:
    """Examples read from a data set by `workers` background processes."""

    dataset: Any
    encode_labels: LabelEncoder
    workers: int = 0

    def __len__(self) -> int:
        return len(self.dataset)

    def batches(self, order: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (images, labels) for each tensor of indices in `order`."""
        loader = DataLoader(
            self.dataset,
            batch_sampler=[indices.tolist() for indices in order],
            num_workers=self.workers,
            collate_fn=_collate,
        )
        for images, labels in loader:
            yield images, self.encode_labels(labels)

    def labels(self) -> Tensor | None:
        """Return all labels if the data set gives them without reading images."""
        known = known_labels(self.dataset)
        return None if known is None else self.encode_labels(known)

    def digest(self) -> str | None:
        """Return a digest of the labels if they are known; the images are not read for it."""
        known = self.labels()
        return None if known is None else digest({"targets": known})

    def to(self, device: torch.device) -> "DatasetExamples":
        """Return itself: images are moved batch by batch."""
        return self


@dataclass(frozen=True)
class CountedExamples:
    """Examples that call `on_progress` with the number of images read in a pass, and their total."""

    examples: Examples
    on_progress: Callable[[int, int], None]

    def __len__(self) -> int:
        return len(self.examples)

    def batches(self, order: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (images, labels) for each tensor of indices in `order`."""
        order, done = list(order), 0
        for batch in self.examples.batches(order):
            yield batch
            done += len(batch[0])
            self.on_progress(done, sum(map(len, order)))

    def labels(self) -> Tensor | None:
        """Return all labels, or None if only reading every image would give them."""
        return self.examples.labels()

    def digest(self) -> str | None:
        """Return the digest of the examples."""
        return self.examples.digest()

    def to(self, device: torch.device) -> "CountedExamples":
        """Return the same examples, with tensors in memory moved to the device."""
        return CountedExamples(self.examples.to(device), self.on_progress)


@dataclass(frozen=True)
class JoinedExamples:
    """Several examples one after the other, such as the images of a task and a memory of old ones."""

    parts: tuple[Examples, ...]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def batches(self, order: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (images, labels) for each tensor of indices in `order`."""
        order = [indices.cpu() for indices in order]
        first = torch.tensor([0, *map(len, self.parts)]).cumsum(0)
        owners = [torch.bucketize(indices, first[1:], right=True) for indices in order]
        readers = []
        for part, examples in enumerate(self.parts):
            own = [indices[owner == part] - first[part] for indices, owner in zip(order, owners, strict=True)]
            readers.append(examples.batches([indices for indices in own if len(indices)]))
        for owner in owners:
            present = owner.unique().tolist()
            read = [next(readers[part]) for part in present]
            places = torch.cat([(owner == part).nonzero()[:, 0] for part in present]).argsort()
            device = read[0][0].device
            images, labels = (torch.cat([value.to(device) for value in values]) for values in zip(*read, strict=True))
            yield images[places.to(device)], labels[places.to(device)]

    def labels(self) -> Tensor | None:
        """Return all labels, or None if only reading every image would give them."""
        known = [part.labels() for part in self.parts]
        return (
            None
            if any(each is None for each in known)
            else torch.cat([each.cpu() for each in known if each is not None])
        )

    def digest(self) -> str | None:
        """Return a digest of those of the parts, or None if one of them has none."""
        digests = [part.digest() for part in self.parts]
        return None if None in digests else digest({}, " ".join(map(str, digests)))

    def to(self, device: torch.device) -> "JoinedExamples":
        """Return the same examples, with tensors in memory moved to the device."""
        return JoinedExamples(tuple(part.to(device) for part in self.parts))


@dataclass(frozen=True)
class ChosenExamples:
    """Some of the examples, by their indices."""

    examples: Examples
    indices: Tensor

    def __len__(self) -> int:
        return len(self.indices)

    def batches(self, order: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (images, labels) for each tensor of indices in `order`."""
        return self.examples.batches([self.indices[indices.cpu()] for indices in order])

    def labels(self) -> Tensor | None:
        """Return all labels, or None if only reading every image would give them."""
        known = self.examples.labels()
        return None if known is None else known[self.indices.to(known.device)]

    def digest(self) -> str | None:
        """Return a digest of the indices and of all examples, or None if those have none."""
        known = self.examples.digest()
        return None if known is None else digest({"indices": self.indices}, known)

    def to(self, device: torch.device) -> "ChosenExamples":
        """Return the same examples, with tensors in memory moved to the device."""
        return ChosenExamples(self.examples.to(device), self.indices)


def choose_examples(examples: Examples, indices: Tensor) -> Examples:
    """Return some of the examples, by their indices."""
    if isinstance(examples, TensorExamples):
        indices = indices.to(examples.images.device)
        return TensorExamples(examples.images[indices], examples.targets[indices], examples.on_host)
    return ChosenExamples(examples, indices.cpu())


def join_examples(*parts: Examples | None) -> Examples:
    """Return several examples as one; those that are tensors in memory become one tensor. Parts may be None."""
    present = [part for part in parts if part is not None and len(part)]
    if len(present) == 1:
        return present[0]
    tensors = [part for part in present if isinstance(part, TensorExamples)]
    if len(tensors) == len(present):
        device = tensors[0].images.device
        images, targets = ([getattr(each, name).to(device) for each in tensors] for name in ("images", "targets"))
        return TensorExamples(torch.cat(images), torch.cat(targets))
    return JoinedExamples(tuple(present))


@dataclass(frozen=True)
class ImageBatches:
    """The images of some examples in order, in batches; it can be iterated over several times.

    `flipped` flips the images left to right. The examples are split into `parts` contiguous parts, of which it yields
    the one with the index `part`.
    """

    examples: Examples
    batch_size: int = 256
    flipped: bool = False
    part: int = 0
    parts: int = 1

    def __iter__(self) -> Iterator[Tensor]:
        indices = torch.arange(len(self.examples)).tensor_split(self.parts)[self.part]
        for images, _ in self.examples.batches(indices.split(self.batch_size)):
            yield images.flip(-1) if self.flipped else images


def known_features(examples: Examples, space: object) -> Tensor | None:
    """Return the features of all examples in a space if their data set knows them, else None.

    A data set knows them if it has a method `known_features(space)`, which returns them or None.
    """
    while isinstance(examples, CountedExamples):
        examples = examples.examples
    read = getattr(examples.dataset, "known_features", None) if isinstance(examples, DatasetExamples) else None
    return None if read is None else read(space)


def read_labels(examples: Examples) -> Tensor:
    """Return all labels; read every image if the labels are not known otherwise."""
    known = examples.labels()
    return torch.cat([labels for _, labels in iterate_batches(examples)]) if known is None else known


def iterate_batches(examples: Examples, batch_size: int = 256) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield all (images, labels) in order, in batches."""
    return examples.batches(torch.arange(len(examples)).split(batch_size))


def as_examples(data: Data, encode_labels: LabelEncoder, *, workers: int = 0) -> Examples:
    """Return the examples of a data set or a pair (images, labels), with encoded labels."""
    reject_loader(data)
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        data = data.tensors
    elif is_dataset(data):
        data = _read_into_memory(data) or as_dataset(data)
    if isinstance(data, (tuple, list)) and len(data) == 2:
        images, labels = data[0], as_labels(data[1])
        images = as_images(images)
        if len(images) != len(labels):
            raise ValueError(f"expected one label per image, got {len(images)} images, {len(labels)} labels")
        examples = TensorExamples(images, encode_labels(labels).to(images.device))
    elif is_dataset(data):
        examples = DatasetExamples(data, encode_labels, workers)
    else:
        hint = "; of a list of pairs pass tuple(zip(*pairs))" if isinstance(data, list) else ""
        if isinstance(data, Mapping):
            hint = f"; it has the keys {', '.join(map(repr, data))}: pass the data set of one, or their pair"
        raise TypeError(
            f"the data of a task must be a data set or a pair (images, labels), got {type(data).__name__}{hint}"
        )
    if len(examples) == 0:
        raise ValueError("the task has no images")
    return examples


def _read_into_memory(dataset: Any) -> Data | None:
    """Return all images and labels of a data set that can `read` many at once, if they fit in memory."""
    whole: Any = dataset.dataset if isinstance(dataset, Subset) else dataset
    if not (hasattr(whole, "read") and hasattr(whole, "bytes_per_image")):
        return None
    indices = dataset.indices if isinstance(dataset, Subset) else range(len(dataset))
    size = len(indices) * whole.bytes_per_image
    if size > free_memory() // 2:
        log.warning("%.1f GiB of images do not fit in memory; they are decoded again in each epoch", size / 2**30)
        return None
    found = whole.read(indices)
    for error in found.skipped:
        log.warning("skipped: %s", error)
    return found.images, found.labels


def as_labels(labels: Any) -> list[ClassName]:
    """Return labels as a list of ints and strings."""
    if getattr(labels, "ndim", 1) != 1:
        shape = tuple(labels.shape)
        hint = "; of a column of labels pass labels[:, 0]" if shape[1:] == (1,) else ""
        hint = hint or ("; of one-hot labels pass labels.argmax(1)" if len(shape) == 2 else "")
        raise ValueError(f"labels must be one class per image, got shape {shape}{hint}")
    if not hasattr(labels, "__iter__"):
        raise TypeError(f"labels and classes must be lists of names or numbers, got {labels!r}")
    return [_as_label(label) for label in (labels.tolist() if hasattr(labels, "tolist") else labels)]


def known_labels(dataset: Any) -> list[ClassName] | None:
    """Return the labels of a data set that has them as `targets`, as torchvision's data sets do; else None."""
    if isinstance(dataset, Subset):
        known = known_labels(dataset.dataset)
        return None if known is None else [known[index] for index in dataset.indices]
    targets = getattr(dataset, "targets", None)
    if targets is None:
        return None
    transform = getattr(dataset, "target_transform", None)
    return as_labels(targets if transform is None else [transform(target) for target in as_labels(targets)])


def _fits_on_gpu(size: int, device: torch.device) -> bool:
    """Return True if two copies of `size` bytes fit into half of the free GPU memory; training needs the rest."""
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return size <= (free + unused) // 4


def _as_label(label: Any) -> Any:
    size = len(label) if isinstance(label, list) else math.prod(getattr(label, "shape", ()))
    if size != 1:
        raise ValueError(
            f"a label must be the name or number of a class, got {size} values; of a one-hot label pass its argmax"
        )
    return label.item() if isinstance(label, (Tensor, np.generic, np.ndarray)) else label


def _collate(items: list[tuple[Any, Any]]) -> tuple[Tensor, list[ClassName]]:
    return as_images([item[0] for item in items]), as_labels([item[1] for item in items])
