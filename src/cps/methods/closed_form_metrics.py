"""Measure a closed form on a sequence of tasks: the bar that a trained method should clear."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cps.data.examples import as_examples, iterate_batches
from cps.data.tasks import Task
from cps.evaluation.method_evaluation import AccuracyRow, accuracy_row, evaluation_of, outputs_of_scores
from cps.evaluation.metrics import Metrics
from cps.methods.closed_form import ClosedForm
from cps.network.subnetwork import local_labels
from cps.selection.max_output import MaxOutput

SELECTOR = MaxOutput()


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
        rows.append(row_of_scores(scores, truth, [len(each.classes) for each in tasks[: index + 1]], group_sizes, seed))
        if on_task is not None:
            on_task(index + 1)
    task_il, class_il = as_metrics(rows)
    return ClosedFormMetrics(
        method.space_name, str(method.classifier), method.flips, task_il, class_il, method.kept(), seconds
    )


def row_of_scores(
    scores: Tensor, truth: Sequence[Tensor], sizes: Sequence[int], group_sizes: Sequence[int], seed: int = 0
) -> AccuracyRow:
    """Return the accuracy from the scores (N, classes) of the test images of all tasks so far.

    `truth` holds the classes of each task's images, as indices within the task, and `sizes` the tasks' numbers of
    classes. A group gets the task with the largest mean score of its best class.
    """
    test = outputs_of_scores(scores, truth, sizes)
    return accuracy_row(test, lambda name: [{} for _ in sizes], [SELECTOR], group_sizes, seed, len(sizes) - 1)


def as_metrics(rows: Sequence[AccuracyRow]) -> tuple[Metrics, dict[int, Metrics]]:
    """Return the metrics of the rows after each task: with the task given, and by group size with the task found."""
    evaluation = evaluation_of(rows)
    return evaluation.task_il, evaluation.class_il[SELECTOR.name]
