"""The prediction of some images."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cps.data.examples import ClassName, as_labels


@dataclass(frozen=True, eq=False)
class Prediction(Sequence[ClassName | None]):
    """The class of each image, the task it was found in, and how certain both are.

    It is a sequence of the classes: it has a length, can be indexed and converted to an array, and `==` compares it
    with labels one by one, so `(prediction == labels).mean()` is the accuracy.

    `share` is the selected task's softmax share of the scores of all tasks: larger for a group of images that agree
    than for one image, and 1 if the task was given. `confidence` is the probability of the class within that task. With
    `reject`, the class of an image that resembles nothing the task has learned is None. `task_scores` and
    `task_shares` hold the selector's scores and their softmax for every task, shape (N, tasks).
    """

    classes: list[ClassName | None]
    tasks: Tensor
    share: Tensor
    confidence: Tensor
    task_scores: Tensor = field(repr=False)
    task_shares: Tensor = field(repr=False)
    _score_all: Callable[[], tuple[tuple[ClassName, ...], Tensor]] | None = field(repr=False)

    @overload
    def __getitem__(self, index: int) -> ClassName | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[ClassName | None]: ...
    def __getitem__(self, index: int | slice) -> ClassName | list[ClassName | None] | None:
        return self.classes[index]

    def __len__(self) -> int:
        return len(self.classes)

    def __eq__(self, other: object) -> Any:
        """Return an array of bools: which classes equal the label at the same place, or the one label."""
        labels = [other] * len(self) if isinstance(other, str) or not hasattr(other, "__iter__") else as_labels(other)
        if len(labels) != len(self):
            raise ValueError(f"expected one label per image, got {len(labels)} labels for {len(self)} images")
        return np.array([own == label for own, label in zip(self.classes, labels, strict=True)], dtype=bool)

    def __ne__(self, other: object) -> Any:
        return ~(self == other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        is_uniform = len(set(map(type, self.classes))) == 1 and None not in self.classes
        return np.array(self.classes, dtype=dtype or (None if is_uniform else object))

    @property
    def all_classes(self) -> tuple[ClassName, ...]:
        """The classes of all tasks in the order of learning: the columns of `scores`."""
        return self._all_scores[0]

    @property
    def scores(self) -> Tensor:
        """The log probability of each of `all_classes`, shape (N, classes), computed when it is first read.

        The largest is that of the predicted class, also where `reject` made it None. With the task given, all other
        classes have minus infinity. A selector may not need the subnetworks of all tasks (`Fusion` with many tasks):
        then the classes of a task whose subnetwork did not run for an image have the scores that are known without it,
        or minus infinity. Of several versions of a class, the most probable one counts. Until it is read, the
        prediction keeps the outputs of the subnetworks.
        """
        return self._all_scores[1]

    @cached_property
    def _all_scores(self) -> tuple[tuple[ClassName, ...], Tensor]:
        assert self._score_all is not None
        found = self._score_all()
        object.__setattr__(self, "_score_all", None)  # it holds the outputs of the subnetworks
        return found

    def top(self, k: int) -> list[list[tuple[ClassName, float]]]:
        """Return the `k` most probable classes of each image with their probabilities, the best first."""
        best = self.scores.exp().topk(min(k, len(self.all_classes)), dim=1)
        rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [[(self.all_classes[index], value) for index, value in zip(*row, strict=True)] for row in rows]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_all_scores": self._all_scores, "_score_all": None}
