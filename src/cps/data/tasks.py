"""Tasks, and scenarios: a data set split into a sequence of tasks with new classes."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from cps.data.class_orders import IDENTITY, class_order
from cps.data.examples import ClassName, Data, as_labels, known_labels
from cps.data.images import as_images
from cps.data.items import as_dataset, is_dataset, reject_loader
from cps.runtime.text import shorten_names


@dataclass(frozen=True, eq=False)
class Task:
    """New classes that are learned together, with their data.

    `train`, `val` and `test` are data sets or pairs (images, labels). A label is one of `classes`; if the
    classes are strings, it may also be an index into `classes`. The index of a task is its position in the sequence
    that a learner has learned, so it is not stored here. `val` is held out of training and calibrates the rejection of
    unknown images (`reject`); it is not used to stop training or to choose an epoch.
    """

    classes: Sequence[ClassName]
    train: Data
    val: Data = None
    test: Data = None

    def __post_init__(self) -> None:
        if isinstance(self.classes, str):
            raise TypeError(f"classes must be a list of names, got the string {self.classes!r}")
        names = tuple(as_labels(self.classes))
        for name in names:
            if not isinstance(name, str | int) or isinstance(name, bool):
                raise TypeError(f"class names must be strings or ints, got {name!r}")
        object.__setattr__(self, "classes", names)

    def __repr__(self) -> str:
        parts = {"train": self.train, "val": self.val, "test": self.test}
        sizes = [f"{name}={_describe_size(data)}" for name, data in parts.items() if data is not None]
        return f"Task({', '.join([shorten_names(self.classes), *sizes])})"


@dataclass(frozen=True, eq=False)
class Scenario:
    """A sequence of tasks, and the order of the classes in it: a seed, a name, or "given" for a list."""

    tasks: tuple[Task, ...]
    order: str | int

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: int) -> Task:
        return self.tasks[index]

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)


def split_by_class(
    train: Data,
    test: Data = None,
    *,
    sizes: int | Sequence[int],
    order: int | str | Sequence[ClassName] | None = None,
    validation: float = 0.0,
    seed: int = 0,
) -> Scenario:
    """Split a data set into tasks with new classes.

    `sizes` is the number of classes per task (the last task may have fewer), or a list with one number for each task,
    as in `[50, 10, 10, 10, 10, 10]`. `order` is a seed for a random order of the classes (drawn by numpy, so 1993
    gives an order that papers use), the name of a published order such as "podnet-1" (`cps.data.class_orders`), the
    order itself, or None for the sorted order. `validation` is the fraction of each class's training images that is
    held out as `task.val`.
    """
    if not 0 <= validation < 1:
        raise ValueError(f"validation must be in [0, 1), got {validation}")
    train, test = _convert(train), _convert(test)
    labels = _labels_of(train)
    test_labels = [] if test is None else _labels_of(test)
    classes, name = _order_classes(sorted(set(labels), key=_sort_key), order)
    untrained = sorted(set(test_labels) - set(labels), key=_sort_key)
    if untrained:
        warnings.warn(f"class {untrained[0]!r} of the test data has no training image; it is left out", stacklevel=2)
    held_out = _hold_out(labels, classes, validation, seed)
    tasks = []
    for group in _split_classes(classes, sizes):
        members = _indices_of(labels, group)
        fit = [index for index in members if index not in held_out]
        val = [index for index in members if index in held_out]
        tasks.append(
            Task(
                group,
                train=_subset(train, fit),
                val=_subset(train, val) if val else None,
                test=None if test is None else _subset(test, _indices_of(test_labels, group)),
            )
        )
    return Scenario(tuple(tasks), name)


def _order_classes(
    classes: list[ClassName], order: int | str | Sequence[ClassName] | None
) -> tuple[list[ClassName], str | int]:
    if order is None:
        return classes, IDENTITY
    if isinstance(order, str):
        return class_order(classes, order), order
    if isinstance(order, int | np.integer):
        return class_order(classes, int(order)), int(order)
    names = as_labels(order)
    if sorted(names, key=_sort_key) != classes:
        raise ValueError("the order must contain every class of the training data exactly once")
    return names, "given"


def _split_classes(classes: list[ClassName], sizes: int | Sequence[int]) -> Iterator[tuple[ClassName, ...]]:
    if isinstance(sizes, int | np.integer):
        if sizes < 1:
            raise ValueError(f"a task needs at least one class, got sizes={sizes}")
        sizes = [min(sizes, len(classes) - start) for start in range(0, len(classes), sizes)]
    if sum(sizes) != len(classes) or min(sizes) < 1:
        raise ValueError(f"the sizes {list(sizes)} do not add up to the {len(classes)} classes of the data")
    start = 0
    for size in sizes:
        yield tuple(classes[start : start + size])
        start += size


def _hold_out(labels: list[ClassName], classes: Sequence[ClassName], share: float, seed: int) -> set[int]:
    """Draw the indices that are held out for validation, a fraction of `share` of each class."""
    if share == 0:
        return set()
    generator = np.random.default_rng(seed)
    held_out: set[int] = set()
    for name in sorted(classes, key=_sort_key):
        members = [index for index, label in enumerate(labels) if label == name]
        number = min(max(1, round(share * len(members))), len(members) - 1)
        held_out.update(generator.choice(members, size=number, replace=False).tolist())
    return held_out


def _labels_of(data: Data) -> list[ClassName]:
    if isinstance(data, (tuple, list)) and len(data) == 2:
        return as_labels(data[1])
    if is_dataset(data):
        known = known_labels(data)
        if known is None:
            known = [data[index][1] for index in range(len(data))]
        return as_labels(known)
    raise TypeError(f"expected a data set or a pair (images, labels), got {type(data).__name__}")


def _indices_of(labels: list[ClassName], group: tuple[ClassName, ...]) -> list[int]:
    wanted = set(group)
    return [index for index, label in enumerate(labels) if label in wanted]


def _convert(data: Data) -> Data:
    """Return a pair as a tensor and a list, which are cheap to take subsets of; a data set as one of pairs."""
    if isinstance(data, (tuple, list)) and len(data) == 2:
        return as_images(data[0]), as_labels(data[1])
    reject_loader(data)
    return as_dataset(data) if is_dataset(data) else data


def _subset(data: Data, indices: list[int]) -> Any:
    if is_dataset(data):
        return Subset(data, indices)
    images, labels = data
    return images[torch.tensor(indices, dtype=torch.long)], [labels[index] for index in indices]


def _describe_size(data: Data) -> str:
    """Return the number of images, or the type of the data if it is unknown."""
    images = data[0] if isinstance(data, tuple | list) and len(data) == 2 else data
    return f"{len(images)} images" if hasattr(images, "__len__") else type(data).__name__


def _sort_key(name: ClassName) -> tuple[bool, ClassName]:
    return isinstance(name, str), name
