"""Evaluate any method: row by row after each task, or at once if its outputs never change."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from cps.data.examples import as_examples, iterate_batches, read_labels
from cps.data.tasks import Task
from cps.evaluation.evaluator import EvaluationOutputs, concatenate_tasks
from cps.evaluation.metrics import Evaluation, Matrix, Metrics
from cps.method import Method
from cps.network.outputs import Evidence, concatenate
from cps.network.subnetwork import local_labels
from cps.selection.base import Selector


@dataclass(frozen=True)
class AccuracyRow:
    """The accuracy on each task after some task, in percent.

    `known` is that with the task given. `found` is that with the task found, and `selection` the share of images whose
    task was found, by the name of the selector and the group size.
    """

    known: tuple[float, ...]
    found: dict[str, dict[int, tuple[float, ...]]]
    selection: dict[str, dict[int, tuple[float, ...]]]


def evaluate_rows(
    method: Method,
    tasks: Sequence[Task],
    *,
    selectors: Sequence[Selector],
    group_sizes: Sequence[int],
    seed: int = 0,
) -> list[AccuracyRow]:
    """Measure a method on the test images of the tasks that it has learned.

    Return the row after the last task, or the rows after each task if the outputs of the method never change. Groups
    are drawn as in `cps.evaluate`.
    """
    test = run_tests(method, tasks)
    last = test.num_tasks - 1
    return [
        _row(method, test, selectors, group_sizes, seed, after)
        for after in (range(test.num_tasks) if method.is_sealed else [last])
    ]


def run_tests(method: Method, tasks: Sequence[Task]) -> EvaluationOutputs:
    """Run the test images of all tasks that a method has learned."""
    parts, labels = [], []
    for classes, task in zip(method.classes, tasks, strict=False):
        if task.test is None:
            raise ValueError(f"task {len(parts)} has no test images")
        examples = as_examples(task.test, partial(local_labels, classes))
        parts.append(_join([method.evidence(images) for images, _ in iterate_batches(examples)]))
        labels.append(read_labels(examples).cpu())
    outputs, task_of_image = concatenate_tasks([list(part) for part in parts])
    whole = Evidence.of(outputs, lambda space: torch.cat([part.features(space) for part in parts]))
    return EvaluationOutputs(whole, task_of_image, torch.cat(labels).to(task_of_image.device))


def evaluation_of(rows: Sequence[AccuracyRow]) -> Evaluation:
    """Return the metrics of the rows after each task."""

    def metrics(name: str, size: int) -> Metrics:
        accuracy = _matrix([row.found[name][size] for row in rows])
        return Metrics.of(accuracy, selection=_matrix([row.selection[name][size] for row in rows]))

    class_il = {name: {size: metrics(name, size) for size in by_size} for name, by_size in rows[-1].found.items()}
    return Evaluation(Metrics.of(_matrix([row.known for row in rows])), class_il)


def _row(
    method: Method,
    test: EvaluationOutputs,
    selectors: Sequence[Selector],
    group_sizes: Sequence[int],
    seed: int,
    after: int,
) -> AccuracyRow:
    """Return the row after task `after`."""
    images = test.images_after(after)
    task, tasks = test.task[:images].cpu(), after + 1

    def percent(is_right: torch.Tensor) -> tuple[float, ...]:
        hits = task[is_right[:images].cpu()].bincount(minlength=tasks)
        return tuple((100 * hits.double() / task.bincount(minlength=tasks)).tolist())

    found: dict[str, dict[int, tuple[float, ...]]] = {selector.name: {} for selector in selectors}
    selection: dict[str, dict[int, tuple[float, ...]]] = {selector.name: {} for selector in selectors}
    for selector in selectors:
        statistics = method.statistics(selector.name)
        for size in group_sizes:
            is_found = test.found(selector, statistics, size, seed, after)
            found[selector.name][size] = percent(is_found.class_)
            selection[selector.name][size] = percent(is_found.task)
    return AccuracyRow(percent(test.is_correct), found, selection)


def _join(parts: Sequence[Evidence]) -> Evidence:
    """Return the evidence of consecutive batches as one."""
    outputs = [concatenate(of_task) for of_task in zip(*parts, strict=True)]
    return Evidence.of(outputs, lambda space: torch.cat([part.features(space) for part in parts]))


def _matrix(rows: Sequence[Sequence[float]]) -> Matrix:
    """Return rows as a matrix (after, on): that of joint training has one row only."""
    matrix = np.full((len(rows), len(rows[-1])), np.nan)
    for after, row in enumerate(rows):
        matrix[after, : len(row)] = row
    return matrix
