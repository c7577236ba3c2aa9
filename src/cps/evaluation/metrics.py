"""Metrics of continual learning, computed from an accuracy matrix, and metrics of open-set recognition.

`accuracy[after, on]` is the accuracy on task `on` after task `after` was learned. Entries above the diagonal
(`on > after`) are NaN. The metrics have the unit of the matrix, usually percent.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cps.evaluation.confusion import Confusion
from cps.storage.json_codec import to_json

Matrix = NDArray[np.float64]


def average_accuracy(accuracy: ArrayLike) -> float:
    """Return ACC: the mean accuracy over all tasks after the last one was learned."""
    return float(as_matrix(accuracy)[-1].mean())


def backward_transfer(accuracy: ArrayLike) -> float:
    """Return BWT with the paper's sign: the mean loss of accuracy since a task was learned, so positive is forgetting.

    It is 0 for a single task.
    """
    accuracy = as_matrix(accuracy)
    if len(accuracy) == 1:
        return 0.0
    learned = np.diagonal(accuracy)[:-1]
    return float((learned - accuracy[-1, :-1]).mean())


def average_incremental_accuracy(accuracy: ArrayLike) -> float:
    """Return AIA: the mean of the ACC after each task."""
    return float(np.mean(history(accuracy)))


def history(accuracy: ArrayLike, weights: ArrayLike | None = None) -> list[float]:
    """Return the ACC after each task, as the accuracy curves of the paper show it.

    All tasks have equal weight unless `weights` are given. With the number of classes of each task as weights, this is
    the accuracy over all images, if every class has equally many.
    """
    accuracy = as_matrix(accuracy)
    counts = np.ones(len(accuracy)) if weights is None else np.asarray(weights, dtype=float)
    ends = range(1, len(accuracy) + 1)
    return [float(np.average(row[:end], weights=counts[:end])) for end, row in zip(ends, accuracy, strict=True)]


def as_matrix(accuracy: ArrayLike) -> Matrix:
    """Return an accuracy matrix, which may be given as nested lists; rows may end at the diagonal."""
    rows = [np.asarray(row, dtype=float) for row in accuracy]  # pyright: ignore[reportGeneralTypeIssues]
    if not rows or any(row.ndim != 1 or len(row) <= after for after, row in enumerate(rows)):
        raise ValueError("accuracy must be a matrix [after, on], with a column for each task in the row after it")
    matrix = np.full((len(rows), max(map(len, rows))), np.nan)
    for after, row in enumerate(rows):
        matrix[after, : len(row)] = row
    return matrix


def auroc(known: ArrayLike, unknown: ArrayLike) -> float:
    """Return the area under the ROC curve: how often a known image scores higher than an unknown one.

    The result is from 0 to 1; ties count half.
    """
    scores = np.sort(np.asarray(unknown))
    ranks = (np.searchsorted(scores, known, side="left") + np.searchsorted(scores, known, side="right")) / 2
    return float(ranks.mean() / len(scores))


def false_positive_rate(known: ArrayLike, unknown: ArrayLike, recall: float) -> float:
    """Return the share of unknown images above the threshold that a share `recall` of the known images reach."""
    best_first = np.sort(np.asarray(known))[::-1]
    threshold = best_first[max(0, int(np.ceil(recall * len(best_first))) - 1)]
    return float((np.asarray(unknown) >= threshold).mean())


@dataclass(frozen=True, eq=False)
class Metrics:
    """An accuracy matrix and the metrics computed from it, in percent.

    `accuracy[after, on]` is the accuracy on task `on` after task `after` was learned; NaN above the diagonal. `top5` is
    None unless every task has more than five classes. `selection` has the same shape as `accuracy` and is the share of
    images whose task was found; None if the task was given.
    """

    ACC: float
    BWT: float
    AIA: float
    accuracy: Matrix
    top5: float | None = None
    selection: Matrix | None = None

    @classmethod
    def of(cls, accuracy: ArrayLike, *, top5: float | None = None, selection: Matrix | None = None) -> "Metrics":
        """Compute the metrics of an accuracy matrix."""
        accuracy = as_matrix(accuracy)
        return cls(
            ACC=average_accuracy(accuracy),
            BWT=backward_transfer(accuracy),
            AIA=average_incremental_accuracy(accuracy),
            accuracy=accuracy,
            top5=top5,
            selection=selection,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Metrics) and to_json(self) == to_json(other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` measured: metrics with the task given, and by selector name and group size with the task found.

    `evaluation.class_il["Cascade"][1].ACC` is the accuracy of the cascade on single images after the last task, and
    `confusion` counts what the first selector takes these images for. Files of early versions have none.
    """

    task_il: Metrics
    class_il: dict[str, dict[int, Metrics]]
    confusion: Confusion | None = None

    def encode(self) -> dict[str, Any]:
        """Return the evaluation as JSON data, as results.json holds it."""
        return to_json(self)
