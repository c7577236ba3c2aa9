"""The metrics of the paper, as functions of the accuracy matrix, and how well two kinds of images are told apart.

`accuracy[after, on]` is the accuracy on task `on` after `after` was learned; entries above the diagonal
(`on > after`) are NaN. Values are percentages wherever the matrix holds percentages.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Matrix = NDArray[np.float64]


def average_accuracy(accuracy: Matrix) -> float:
    """Return ACC: the mean over all tasks after the last was learned."""
    return float(accuracy[-1].mean())


def backward_transfer(accuracy: Matrix) -> float:
    """Return BWT with the paper's sign: how much was forgotten, so positive is bad; 0 for a single task."""
    if len(accuracy) == 1:
        return 0.0
    learned = np.diagonal(accuracy)[:-1]
    return float((learned - accuracy[-1, :-1]).mean())


def average_incremental_accuracy(accuracy: Matrix) -> float:
    """Return AIA: the mean of ACC over the whole sequence of tasks."""
    return float(np.mean(history(accuracy)))


def history(accuracy: Matrix, weights: ArrayLike | None = None) -> list[float]:
    """Return ACC after each task, as the paper's accuracy curves show it.

    Tasks count alike unless `weights` are given: with their numbers of classes this is the accuracy over all images.
    """
    counts = np.ones(len(accuracy)) if weights is None else np.asarray(weights, dtype=float)
    ends = range(1, len(accuracy) + 1)
    return [float(np.average(row[:end], weights=counts[:end])) for end, row in zip(ends, accuracy, strict=True)]


def auroc(known: ArrayLike, strange: ArrayLike) -> float:
    """Return how often a known thing scores higher than a strange one, of 1; ties count half."""
    scores = np.sort(np.asarray(strange))
    places = (np.searchsorted(scores, known, side="left") + np.searchsorted(scores, known, side="right")) / 2
    return float(places.mean() / len(scores))


def false_positive_rate(known: ArrayLike, strange: ArrayLike, recall: float) -> float:
    """Return the share of strange things that pass a threshold which that share of known ones pass."""
    best_first = np.sort(np.asarray(known))[::-1]
    threshold = best_first[max(0, int(np.ceil(recall * len(best_first))) - 1)]
    return float((np.asarray(strange) >= threshold).mean())


def summary(accuracy: Matrix) -> dict[str, object]:
    """Return the metrics and the matrix itself as plain data for `results.json`."""
    return {
        "ACC": average_accuracy(accuracy),
        "BWT": backward_transfer(accuracy),
        "AIA": average_incremental_accuracy(accuracy),
        "accuracy": [[None if np.isnan(value) else float(value) for value in row] for row in accuracy],
    }
