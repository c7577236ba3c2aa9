"""Items of data sets: a data set of any library as one whose items are pairs (image, label)."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset

IMAGE, LABEL = "image", "label"  # the keys of dicts, unless others are given


class DictDataset(Dataset):
    """A data set whose items are dicts, such as those of Hugging Face, as one of pairs (image, label).

    >>> import cps
    >>> data = [{"img": 0.5, "fine_label": 3}]
    >>> cps.DictDataset(data, image="img", label="fine_label")[0]
    (0.5, 3)
    """

    def __init__(self, data: Any, image: str = IMAGE, label: str = LABEL):
        self.data, self.image, self.label = data, image, label
        missing = [key for key in (image, label) if len(data) and key not in data[0]]
        if missing:
            raise ValueError(
                f"the items of the data set are dicts with {_keys(data[0])}, and none is '{missing[0]}'; name those of "
                'the image and of the label: cps.DictDataset(data, image="...", label="...")'
            )

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        item = self.data[index]
        return item[self.image], item[self.label]

    @property
    def targets(self) -> list[Any] | None:
        """All labels if the data set has a column of them that no transform computes, as Hugging Face's have."""
        if self.label not in getattr(self.data, "column_names", ()) or self.data.format["type"] == "custom":
            return None
        return list(self.data.with_format(None)[self.label])


def is_dataset(data: Any) -> bool:
    """Return True for a data set: something with items and a length that is neither an array nor a list."""
    has_items = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    is_other = hasattr(data, "__array__") or isinstance(data, Mapping | tuple | list | str | bytes)
    return isinstance(data, Dataset) or (has_items and not is_other)


def as_dataset(data: Any) -> Any:
    """Return a data set whose items are pairs; raise an error for one whose items are something else."""
    reject_loader(data)
    if not hasattr(data, "__len__"):
        raise TypeError(f"a data set must have a length, got {type(data).__name__}")
    if len(data) == 0:
        raise ValueError("the data set has no images")
    first = data[0]
    if isinstance(first, Mapping):
        return DictDataset(data)
    if not _is_pair(first):
        raise TypeError(
            f"an item of a data set must be a pair (image, label) or a dict, got {type(first).__name__}; pass images "
            "and labels as a pair (images, labels)"
        )
    return data


def image_of(item: Any) -> Any:
    """Return the image of an item of a data set: a pair, a dict, or the image itself."""
    if isinstance(item, Mapping):
        if IMAGE not in item:
            raise ValueError(f"expected images, got dicts with {_keys(item)}; pass the images alone: data['...']")
        return item[IMAGE]
    return item[0] if isinstance(item, tuple) or _is_pair(item) else item


def reject_loader(data: Any) -> None:
    """Raise `TypeError` for a data loader: batches are made here."""
    if isinstance(data, DataLoader):
        raise TypeError(
            "expected images or a data set, got a DataLoader; pass loader.dataset (the batch size of training is that "
            "of cps.Training, and cps.Learner(workers=...) reads in the background)"
        )


def _is_pair(item: Any) -> bool:
    """Return True for (image, label, ...), as a tuple or a list; a list may also be an image of lists."""
    if isinstance(item, tuple):
        return len(item) > 1
    return isinstance(item, list) and len(item) > 1 and _num_axes(item[1]) < _num_axes(item[0])


def _num_axes(value: Any) -> int:
    return value.ndim if hasattr(value, "ndim") else 2 if hasattr(value, "getbands") else np.ndim(value)


def _keys(item: Mapping[Any, Any]) -> str:
    return f"the keys {', '.join(map(repr, item))}"
