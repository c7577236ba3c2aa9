"""Evaluation: accuracy matrices of every selector and group size, from one pass over the test images.

Sealed subnetworks never change, so each test image passes each subnetwork once. The row "after task t" of a matrix is
then computed from the outputs of the first t + 1 subnetworks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cps.data.examples import ClassName, LabelEncoder, as_examples, read_labels
from cps.data.rotations import average_views
from cps.data.tasks import Task
from cps.evaluation.confusion import Confusion
from cps.evaluation.metrics import Evaluation, Matrix, Metrics
from cps.learner import Learner
from cps.network.outputs import Evidence, Outputs, concatenate
from cps.network.subnetwork import Statistics, Subnetwork, local_labels
from cps.runtime.seeding import generator
from cps.runtime.text import shorten_names
from cps.selection.base import Selector
from cps.selection.gather import gather_evidence
from cps.selection.groups import consecutive_groups
from cps.selection.predict import choose_classes, class_scorer, select
from cps.selection.statistics import check_selectors

GROUP_SIZES = (1, 2, 5, 10, 20, 50)


class Found(NamedTuple):
    """Whether the task and the class of each image are found."""

    task: Tensor
    class_: Tensor


@dataclass(frozen=True)
class EvaluationOutputs:
    """What all subnetworks and spaces say about the test images of all tasks, ordered by task.

    `task[i]` is the task of image i, and `truth[i]` the output of that task's subnetwork that is its class.
    """

    whole: Evidence
    task: Tensor
    truth: Tensor

    @property
    def num_tasks(self) -> int:
        """The number of tasks."""
        return len(self.whole)

    @cached_property
    def is_correct(self) -> Tensor:
        """Whether the subnetwork of each image's task predicts its class."""
        return self._is_among_best(lambda task: self.whole[task].logits, 1)

    @cached_property
    def in_top5(self) -> Tensor | None:
        """Whether the class of each image is among its task's five largest logits; None if a task has too few."""
        return self.is_among_top5(lambda task: self.whole[task].logits)

    def is_among_top5(self, scores: Callable[[int], Tensor]) -> Tensor | None:
        """Return whether the class of each image is among the five largest scores (N, classes) of its task."""
        has_enough = all(self.whole[task].logits.shape[1] > 5 for task in range(self.num_tasks))
        return self._is_among_best(scores, 5) if has_enough else None

    def evidence(self, images: Tensor | slice = slice(None), tasks: int | None = None) -> Evidence:
        """Return the evidence of the first `tasks` subnetworks for some of the images."""
        outputs = self.whole[:tasks]
        return Evidence.of(
            [Outputs(*(values[images] for values in each)) for each in outputs],
            lambda space: self.whole.features(space)[images],
        )

    def images_after(self, task: int) -> int:
        """Return the number of test images of all tasks up to and including `task`."""
        return int((self.task <= task).sum())

    def found(
        self, selector: Selector, statistics: Sequence[Statistics], group_size: int, seed: int, after: int
    ) -> "Found":
        """Return whether task and class of each image are found after task `after`, in groups drawn with a seed."""
        images, kept = self.images_after(after), statistics[: after + 1]
        evidence, task = self.evidence(slice(images), after + 1), self.task[:images]
        groups = shuffled_groups(self.task, group_size, seed)[:images]
        selected = select(selector, evidence, kept, groups).tasks
        _, chosen = choose_classes(selector, evidence, kept, selected)
        is_selected = selected.to(task.device) == task
        return Found(is_selected, is_selected & (chosen.to(task.device) == self.truth[:images]))

    def _is_among_best(self, scores: Callable[[int], Tensor], number: int) -> Tensor:
        found = torch.zeros(len(self.task), dtype=torch.bool, device=self.task.device)
        for task in range(self.num_tasks):
            images = self.task == task
            best = scores(task)[images].topk(number, dim=1).indices
            found[images] = (best == self.truth[images, None]).any(dim=1)
        return found


def evaluate(
    learner: Learner,
    tasks: Iterable[Task],
    *,
    group_sizes: Sequence[int] = GROUP_SIZES,
    selectors: Sequence[Selector] | Mapping[str, Selector] | None = None,
    flips: bool = False,
    seed: int = 0,
) -> Evaluation:
    """Measure the accuracy on the test images of all learned tasks, in percent.

    Groups are drawn at random within a task; the last group may be smaller. If the task of a group is mistaken, all of
    its images count as wrong. With `flips`, outputs are averaged over each image and its mirror image, which takes
    twice the time (the paper's code selects with both). `selectors` (default: the learner's) may be a dictionary, whose
    keys then name them in the result. With several processes, all must make this call, and they share the work.
    """
    if isinstance(tasks, Task):
        raise TypeError("tasks must be all learned tasks in the order of learning, got one cps.Task; pass [task]")
    with learner.network.in_use():
        test = run_test_images(learner, tasks, flips=flips)
        after_each = dict.fromkeys(range(test.num_tasks), test.is_correct)
        task_il = Metrics.of(_accuracy_matrix(test, after_each), top5=_mean_after_last(test, test.in_top5))
        selectors = learner.config.selectors if selectors is None else selectors
        is_named = isinstance(selectors, Mapping)
        named = selectors if is_named else {selector.name: selector for selector in check_selectors(selectors)}
        class_il = {
            name: {size: _class_il(learner, selector, test, size, seed) for size in group_sizes}
            for name, selector in named.items()
        }
        return Evaluation(task_il, class_il, _confusion(learner, next(iter(named.values())), test))


def run_test_images(learner: Learner, tasks: Iterable[Task], *, flips: bool = False) -> EvaluationOutputs:
    """Run the test images of all learned tasks through every subnetwork."""
    network = learner.network
    parts: list[Evidence] = []
    labels: list[Tensor] = []
    for subnetwork, task in zip(network.subnetworks, tasks, strict=False):
        if task.test is None:
            raise ValueError(f"task {len(parts)} has no test images")
        if set(task.classes) != set(subnetwork.classes):
            raise ValueError(
                f"task {len(parts)} was learned with the classes {shorten_names(subnetwork.classes)}, but the task "
                f"to evaluate has {shorten_names(task.classes)}; pass the tasks in the order of learning"
            )
        examples = as_examples(task.test, _label_encoder(task, subnetwork), workers=learner.workers)
        evidence = gather_evidence(network, examples, learner.fabric)
        if flips:
            evidence = _average(evidence, gather_evidence(network, examples, learner.fabric, flipped=True))
        evidence.compute()
        parts.append(evidence)
        labels.append(read_labels(examples).to(network.device))
    if not parts:
        raise ValueError("no task to evaluate: the learner has learned none, or no task was passed")
    outputs, task = concatenate_tasks([list(part) for part in parts])
    whole = Evidence.of(outputs[: len(parts)], lambda space: torch.cat([part.features(space) for part in parts]))
    return EvaluationOutputs(whole, task, torch.cat(labels))


def concatenate_tasks(parts: Sequence[Sequence[Outputs]]) -> tuple[list[Outputs], Tensor]:
    """Concatenate the images of several tasks; return the outputs of each subnetwork, and the task of each image.

    `parts[task][index]` are the outputs of subnetwork `index` for the images of a task.
    """
    outputs = [concatenate(of_subnetwork) for of_subnetwork in zip(*parts, strict=True)]
    sizes = torch.tensor([len(part[0].logits) for part in parts], device=outputs[0].logits.device)
    return outputs, torch.arange(len(parts), device=sizes.device).repeat_interleave(sizes)


def _label_encoder(task: Task, subnetwork: Subnetwork) -> LabelEncoder:
    """Return a function from labels of a task to outputs of its subnetwork, whose classes may be in another order."""
    outputs = subnetwork.local(task.classes)
    return lambda labels: outputs[local_labels(task.classes, labels)]


def _class_il(learner: Learner, selector: Selector, test: EvaluationOutputs, group_size: int, seed: int) -> Metrics:
    statistics = learner.network.statistics(selector.name)
    found = {after: test.found(selector, statistics, group_size, seed, after) for after in range(test.num_tasks)}
    in_top5 = test.is_among_top5(class_scorer(selector, test.evidence(), statistics))
    if in_top5 is not None:
        in_top5 = in_top5 & found[test.num_tasks - 1].task
    return Metrics.of(
        _accuracy_matrix(test, {after: each.class_ for after, each in found.items()}),
        top5=_mean_after_last(test, in_top5),
        selection=_accuracy_matrix(test, {after: each.task for after, each in found.items()}),
    )


def _confusion(learner: Learner, selector: Selector, test: EvaluationOutputs) -> Confusion:
    """Count what single images are taken for after the last task."""
    subnetworks, statistics = learner.network.subnetworks[: test.num_tasks], learner.network.statistics(selector.name)
    evidence, single = test.evidence(), torch.arange(len(test.task), device=test.task.device)
    selected = select(selector, evidence, statistics[: test.num_tasks], single).tasks
    _, chosen = choose_classes(selector, evidence, statistics[: test.num_tasks], selected)

    def names(tasks: Tensor, outputs: Tensor) -> list[ClassName]:
        pairs = zip(tasks.tolist(), outputs.tolist(), strict=True)
        return [subnetworks[task].classes[output] for task, output in pairs]

    every = dict.fromkeys(name for subnetwork in subnetworks for name in subnetwork.classes)
    return Confusion.of(every, names(test.task, test.truth), names(selected, chosen))


def _mean_after_last(test: EvaluationOutputs, is_correct: Tensor | None) -> float | None:
    """Return the mean accuracy over tasks after the last one."""
    if is_correct is None:
        return None
    last = test.num_tasks - 1
    return float(_accuracy_matrix(test, {last: is_correct})[last].mean())


def _average(first: Evidence, second: Evidence) -> Evidence:
    """Return the mean of the evidence of two views of the same images."""

    def mean(tasks: Sequence[int]) -> list[Outputs]:
        views = zip(first.compute(tasks), second.compute(tasks), strict=True)
        return [Outputs(*(average_views(torch.stack(parts)) for parts in zip(*both, strict=True))) for both in views]

    return Evidence(mean, len(first), lambda space: (first.features(space) + second.features(space)) / 2)


def shuffled_groups(task: Tensor, group_size: int, seed: int) -> Tensor:
    """Return the group of each image; groups are drawn at random within a task."""
    groups, first = [], 0
    for index, images in enumerate(task.bincount().tolist()):
        own = torch.empty(images, dtype=torch.long)
        own[torch.randperm(images, generator=generator(seed, index))] = first + consecutive_groups(images, group_size)
        groups.append(own)
        first = int(own.max()) + 1
    return torch.cat(groups).to(task.device)


def _accuracy_matrix(test: EvaluationOutputs, is_correct: Mapping[int, Tensor]) -> Matrix:
    """Return the matrix (after, on) of the percentage of correct images; NaN above the diagonal.

    `is_correct[after]` is about the images of all tasks, or of the tasks up to `after`.
    """
    tasks, images = test.num_tasks, test.task.bincount()
    matrix = np.full((tasks, tasks), np.nan)
    for after, correct in is_correct.items():
        hits = test.task[: len(correct)][correct].bincount(minlength=tasks)
        matrix[after, : after + 1] = (100 * hits / images)[: after + 1].cpu().numpy()
    return matrix
