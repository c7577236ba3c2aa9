"""Evaluate any method: row by row after each task, or at once if its outputs never change."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from cps.data.examples import as_examples, iterate_batches, read_labels
from cps.data.tasks import Task
from cps.evaluation.evaluator import EvaluationOutputs, concatenate_tasks
from cps.evaluation.metrics import Evaluation, Matrix, Metrics
from cps.method import Method
from cps.network.outputs import Evidence, Outputs, concatenate
from cps.network.subnetwork import Statistics, local_labels
from cps.selection.base import Selector
from cps.selection.predict import class_scorer


@dataclass(frozen=True)
class AccuracyRow:
    """The accuracy on each task after some task, in percent.

    `known` is that with the task given. `found` is that with the task found, and `selection` the share of images whose
    task was found, by the name of the selector and the group size. `known_top5` and `found_top5` count images whose
    class is among the five best of its task: those after all tasks, None if a task has at most five classes.
    """

    known: tuple[float, ...]
    found: dict[str, dict[int, tuple[float, ...]]]
    selection: dict[str, dict[int, tuple[float, ...]]]
    known_top5: tuple[float, ...] | None = None
    found_top5: dict[str, dict[int, tuple[float, ...]]] | None = None


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
        accuracy_row(test, method.statistics, selectors, group_sizes, seed, after)
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


def outputs_of_scores(scores: Tensor, truth: Sequence[Tensor], sizes: Sequence[int]) -> EvaluationOutputs:
    """Return scores (N, classes) of the test images of all tasks as the outputs of a method.

    `truth` holds the classes of each task's images, as indices within the task, and `sizes` the tasks' numbers of
    classes.
    """
    features = scores.new_zeros(len(scores), 0)
    task = torch.arange(len(truth)).repeat_interleave(torch.tensor([len(part) for part in truth]))
    outputs = [Outputs(features, part) for part in scores.split(list(sizes), dim=1)]
    return EvaluationOutputs(Evidence.of(outputs), task.to(scores.device), torch.cat(list(truth)).to(scores.device))


def accuracy_row(
    test: EvaluationOutputs,
    statistics: Callable[[str], Sequence[Statistics]],
    selectors: Sequence[Selector],
    group_sizes: Sequence[int],
    seed: int,
    after: int,
) -> AccuracyRow:
    """Return the row after task `after`; `statistics` returns what a selector of some name has kept."""
    images = test.images_after(after)
    task, tasks = test.task[:images].cpu(), after + 1

    def percent(is_right: Tensor) -> tuple[float, ...]:
        hits = task[is_right[:images].cpu()].bincount(minlength=tasks)
        return tuple((100 * hits.double() / task.bincount(minlength=tasks)).tolist())

    found: dict[str, dict[int, tuple[float, ...]]] = {}
    selection: dict[str, dict[int, tuple[float, ...]]] = {}
    found_top5: dict[str, dict[int, tuple[float, ...]]] = {}
    for selector in selectors:
        kept, name = statistics(selector.name), selector.name
        by_size = {size: test.found(selector, kept, size, seed, after) for size in group_sizes}
        found[name] = {size: percent(each.class_) for size, each in by_size.items()}
        selection[name] = {size: percent(each.task) for size, each in by_size.items()}
        in_top5 = _in_top5(test, selector, kept) if tasks == test.num_tasks else None
        if in_top5 is not None:
            found_top5[name] = {size: percent(each.task & in_top5) for size, each in by_size.items()}
    known_top5 = percent(test.in_top5) if found_top5 and test.in_top5 is not None else None
    return AccuracyRow(percent(test.is_correct), found, selection, known_top5, found_top5 or None)


def evaluation_of(rows: Sequence[AccuracyRow]) -> Evaluation:
    """Return the metrics of the rows after each task."""
    last = rows[-1]

    def metrics(name: str, size: int) -> Metrics:
        accuracy = _matrix([row.found[name][size] for row in rows])
        top5 = (last.found_top5 or {}).get(name)
        selection = _matrix([row.selection[name][size] for row in rows])
        return Metrics.of(accuracy, top5=_mean(top5[size] if top5 else None), selection=selection)

    class_il = {name: {size: metrics(name, size) for size in by_size} for name, by_size in last.found.items()}
    return Evaluation(Metrics.of(_matrix([row.known for row in rows]), top5=_mean(last.known_top5)), class_il)


def _in_top5(test: EvaluationOutputs, selector: Selector, statistics: Sequence[Statistics]) -> Tensor | None:
    """Return whether the class of each image is among the five that the selector prefers in its task."""
    return test.is_among_top5(class_scorer(selector, test.evidence(), statistics))


def _mean(values: Sequence[float] | None) -> float | None:
    """Return the mean of the values, or None if they were not measured."""
    return None if values is None else sum(values) / len(values)


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
