"""Measure a closed form on a sequence of tasks: the bar that a trained method should clear."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from cps.data.examples import as_examples, iterate_batches
from cps.data.tasks import Task
from cps.evaluation.evaluator import shuffled_groups
from cps.evaluation.metrics import Metrics
from cps.methods.closed_form import ClosedForm, best_classes, select_tasks
from cps.network.subnetwork import local_labels


@dataclass(frozen=True)
class ClosedFormMetrics:
    """What a closed form reaches, in percent: with the task given, and by group size with the task found.

    `space` and `classifier` name it, `flips` says whether mirror images were added to its sums. `kept` are the bytes
    that it keeps, by what they are, and `seconds` the time to learn all tasks.
    """

    space: str
    classifier: str
    flips: bool
    task_il: Metrics
    class_il: dict[int, Metrics]
    kept: dict[str, int]
    seconds: float

    @property
    def label(self) -> str:
        """Its name in tables: the classifier and the space."""
        return f"closed form ({self.classifier.split('(')[0]}, {self.space.split('(')[0]})"


@dataclass(frozen=True)
class AccuracyRow:
    """The accuracy on each task after some task, in percent.

    `known` is that with the task given, `found` that with the task found by group size, and `selection` the share of
    images whose task was found. `known_top5` and `found_top5` count images whose class is among the five best of the
    task; None if a task has at most five classes.
    """

    known: list[float]
    found: dict[int, list[float]]
    selection: dict[int, list[float]]
    known_top5: list[float] | None = None
    found_top5: dict[int, list[float]] | None = None


def measure_closed_form(
    method: ClosedForm,
    tasks: Sequence[Task],
    *,
    group_sizes: Sequence[int],
    seed: int = 0,
    on_task: Callable[[int], None] | None = None,
) -> ClosedFormMetrics:
    """Learn the tasks and measure the accuracy on their test images after each of them.

    Groups are drawn as in `cps.evaluate`. `on_task` is called with the number of tasks learned.
    """
    features: list[Tensor] = []
    truth: list[Tensor] = []
    rows: list[AccuracyRow] = []
    seconds = 0.0
    for index, task in enumerate(tasks):
        start = time.monotonic()
        method.learn(task)
        linear = method.linear_scores()
        seconds += time.monotonic() - start
        examples = as_examples(task.test, partial(local_labels, task.classes), workers=method.workers)
        parts = [(method.features(images), labels) for images, labels in iterate_batches(examples)]
        features.append(torch.cat([values for values, _ in parts]))
        truth.append(torch.cat([labels.cpu() for _, labels in parts]))
        scores = torch.cat([linear(values.double()) for values in features])
        rows.append(accuracy_row(scores, truth, [len(each.classes) for each in tasks[: index + 1]], group_sizes, seed))
        if on_task is not None:
            on_task(index + 1)
    task_il, class_il = as_metrics(rows)
    return ClosedFormMetrics(
        method.space_name, str(method.classifier), method.flips, task_il, class_il, method.kept(), seconds
    )


def accuracy_row(
    scores: Tensor, truth: Sequence[Tensor], sizes: Sequence[int], group_sizes: Sequence[int], seed: int = 0
) -> AccuracyRow:
    """Return the accuracy from the scores (N, classes) of the test images of all tasks so far.

    `truth` holds the classes of each task's images, as indices within the task, and `sizes` the tasks' numbers of
    classes.
    """
    images = torch.tensor([len(part) for part in truth])
    task = torch.arange(len(truth)).repeat_interleave(images)
    first = torch.tensor([0, *sizes]).cumsum(0)
    target = torch.cat([part + start for part, start in zip(truth, first.tolist(), strict=False)])

    def by_task(is_right: Tensor) -> list[float]:
        return (100 * task[is_right].bincount(minlength=len(truth)).double() / images).tolist()

    in_top5 = _is_among_best(scores, sizes, task, target, 5) if min(sizes) > 5 else None
    found, selection, found_top5 = {}, {}, {}
    for size in group_sizes:
        groups = shuffled_groups(task, size, seed)
        selected = select_tasks(scores, sizes, groups)[groups]
        is_selected = selected == task
        selection[size] = by_task(is_selected)
        found[size] = by_task(is_selected & (best_classes(scores, sizes, selected) == target))
        if in_top5 is not None:
            found_top5[size] = by_task(is_selected & in_top5)
    known = by_task(best_classes(scores, sizes, task) == target)
    return AccuracyRow(known, found, selection, None if in_top5 is None else by_task(in_top5), found_top5 or None)


def as_metrics(rows: Sequence[AccuracyRow]) -> tuple[Metrics, dict[int, Metrics]]:
    """Return the metrics of the rows after each task: with the task given, and by group size with the task found."""
    last = rows[-1]
    task_il = Metrics.of(_matrix([row.known for row in rows]), top5=_mean(last.known_top5))
    class_il = {
        size: Metrics.of(
            _matrix([row.found[size] for row in rows]),
            top5=_mean(None if last.found_top5 is None else last.found_top5[size]),
            selection=_matrix([row.selection[size] for row in rows]),
        )
        for size in rows[0].found
    }
    return task_il, class_il


def _is_among_best(scores: Tensor, sizes: Sequence[int], task: Tensor, target: Tensor, number: int) -> Tensor:
    """Return whether the target of each image is among the classes with the largest scores of its task."""
    own = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)) == task[:, None]
    best = scores.masked_fill(~own, -torch.inf).topk(number, dim=1).indices
    return (best == target[:, None]).any(dim=1)


def _mean(values: Sequence[float] | None) -> float | None:
    """Return the mean of the values, or None if they were not measured."""
    return None if values is None else sum(values) / len(values)


def _matrix(rows: Sequence[Sequence[float]]) -> np.ndarray:
    matrix = np.full((len(rows), len(rows)), np.nan)
    for after, row in enumerate(rows):
        matrix[after, : after + 1] = row
    return matrix
