"""Evaluation: accuracy matrices of every selector and group size, from one pass over the test images.

Sealed subnetworks never change, so each test image passes each subnetwork once for the whole run; every row
"after task t" is arithmetic on that evidence, restricted to the first t + 1 subnetworks.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cps.data.examples import ToLocal, all_labels, as_examples
from cps.data.rotations import mean_of
from cps.data.tasks import Task
from cps.evaluation.metrics import Matrix, summary
from cps.learner import Learner
from cps.network.outputs import Evidence, Outputs, concatenate
from cps.network.subnetwork import Subnetwork, local_labels, shortened
from cps.runtime.seeding import generator
from cps.selection.base import Selector, select
from cps.selection.gather import gather_evidence
from cps.selection.groups import consecutive_groups
from cps.selection.statistics import check_selectors

GROUP_SIZES = (1, 2, 5, 10, 20, 50)


@dataclass(frozen=True)
class Tested:
    """The test images of all tasks in turn: evidence to select, and per image its task and what is right of it.

    `right` says whether the true subnetwork names the class, `right_of_five` whether that is among its five best.
    """

    evidence: Sequence[Outputs]
    task: Tensor
    right: Tensor
    right_of_five: Tensor | None

    @property
    def tasks(self) -> int:
        """How many tasks were tested."""
        return int(self.task.max()) + 1

    def until(self, after: int) -> tuple[Evidence, int]:
        """Return the evidence as it was after a task: of the subnetworks so far, on the images of their tasks."""
        images = int((self.task <= after).sum())
        return self.of(slice(images), after + 1), images

    def of(self, images: Tensor | slice, subnetworks: int) -> Evidence:
        """Return the evidence of some of the images, by the first subnetworks."""
        seen = [Outputs(*(values[images] for values in outputs)) for outputs in self.evidence[:subnetworks]]
        return Evidence(lambda tasks: [seen[task] for task in tasks], subnetworks)


def evaluate(
    learner: Learner,
    tasks: Iterable[Task],
    *,
    group_sizes: Sequence[int] = GROUP_SIZES,
    selectors: Sequence[Selector] | Mapping[str, Selector] | None = None,
    flips: bool = False,
    seed: int = 0,
) -> dict[str, object]:
    """Return `task_il` and `class_il` of all learned tasks, in percent, as `results.json` holds them.

    Groups are drawn within a task, shuffled with the seed; the last, smaller group counts too. A group
    whose task is mistaken counts as wrong whole. With `flips`, outputs are averaged over each image and its mirror
    image, for twice the work (the paper's code selects with both). Where every task has more than five classes,
    `top5` is the share of images whose class is among the five best of the selected subnetwork. Selectors may be
    given names to be listed by, else their own count. Several processes share the work, and all must call this.
    """
    with learner.network.in_use():
        tested = look(learner, tasks, flips=flips)
        task_il = summary(_matrix(tested, dict.fromkeys(range(tested.tasks), tested.right)))
        task_il |= _top5(tested.right_of_five, tested)
        selectors = learner.selectors if selectors is None else selectors
        is_named = isinstance(selectors, Mapping)
        named = selectors if is_named else {selector.name: selector for selector in check_selectors(selectors)}
        class_il = {
            name: {str(size): _class_il(learner, selector, tested, size, seed) for size in group_sizes}
            for name, selector in named.items()
        }
        return {"task_il": task_il, "class_il": class_il}


def look(learner: Learner, tasks: Iterable[Task], *, flips: bool = False) -> Tested:
    """Pass the test images of all learned tasks through every subnetwork."""
    network = learner.network
    parts: list[list[Outputs]] = []
    labels: list[Tensor] = []
    for subnetwork, task in zip(network.subnetworks, tasks, strict=False):
        if task.test is None:
            raise ValueError(f"task {len(parts)} has no test images")
        if set(task.classes) != set(subnetwork.classes):
            raise ValueError(
                f"task {len(parts)} was learned with the classes {shortened(subnetwork.classes)}, the one to evaluate "
                f"in its place has {shortened(task.classes)}"
            )
        examples = as_examples(task.test, _outputs_of(task, subnetwork), workers=learner.workers)
        evidence = gather_evidence(network, examples, learner.fabric)
        if flips:
            evidence = _averaged(evidence, gather_evidence(network, examples, learner.fabric, flipped=True))
        parts.append(list(evidence))
        labels.append(all_labels(examples).to(network.device))
    if not parts:
        raise ValueError("there is no task to evaluate: nothing was learned, or no task was given")
    own = [part[index].logits for index, part in enumerate(parts)]
    right = [logits.argmax(dim=1) == truth for logits, truth in zip(own, labels, strict=True)]
    five = None
    if all(logits.shape[1] > 5 for logits in own):
        best = [logits.topk(5, dim=1).indices == truth[:, None] for logits, truth in zip(own, labels, strict=True)]
        five = torch.cat([among.any(dim=1) for among in best])
    return Tested(*in_turn(parts), torch.cat(right), five)


def in_turn(parts: Sequence[Sequence[Outputs]]) -> tuple[list[Outputs], Tensor]:
    """Return what each subnetwork says about the images of all tasks in turn, and the task of each image.

    `parts[task][index]` is what subnetwork `index` says about those of a task.
    """
    every = [concatenate(same) for same in zip(*parts, strict=True)]
    sizes = torch.tensor([len(part[0].logits) for part in parts], device=every[0].logits.device)
    return every, torch.arange(len(parts), device=sizes.device).repeat_interleave(sizes)


def _outputs_of(task: Task, subnetwork: Subnetwork) -> ToLocal:
    """Return a function from labels of a task to outputs of its subnetwork, whose classes may be in another order."""
    outputs = subnetwork.local(task.classes)
    return lambda labels: outputs[local_labels(task.classes, labels)]


def _class_il(learner: Learner, selector: Selector, tested: Tested, group_size: int, seed: int) -> dict[str, object]:
    statistics = learner.network.statistics(selector.name)
    groups = _shuffled_groups(tested.task, group_size, seed)
    selected = {}
    for after in range(tested.tasks):
        known, images = tested.until(after)
        found = select(selector, known, statistics[: after + 1], groups[:images]).tasks
        selected[after] = found.to(tested.task.device) == tested.task[:images]
    accuracy = _matrix(tested, {after: found & tested.right[: len(found)] for after, found in selected.items()})
    last = selected[max(selected)]
    five = None if tested.right_of_five is None else tested.right_of_five & last
    selection = summary(_matrix(tested, selected))["accuracy"]
    return {**summary(accuracy), **_top5(five, tested), "selection": selection}


def _top5(right: Tensor | None, tested: Tested) -> dict[str, float]:
    if right is None:
        return {}
    last = tested.tasks - 1
    return {"top5": float(_matrix(tested, {last: right})[last].mean())}


def _averaged(first: Evidence, second: Evidence) -> Evidence:
    """Return the mean of the evidence of two views of the same images."""

    def mean(tasks: Sequence[int]) -> list[Outputs]:
        views = zip(first.ask(tasks), second.ask(tasks), strict=True)
        return [Outputs(*(mean_of(torch.stack(parts)) for parts in zip(*both, strict=True))) for both in views]

    return Evidence(mean, len(first))


def _shuffled_groups(task: Tensor, group_size: int, seed: int) -> Tensor:
    """Return the group of each image, drawn at random within its task."""
    groups, first = [], 0
    for on, images in enumerate(task.bincount().tolist()):
        own = torch.empty(images, dtype=torch.long)
        own[torch.randperm(images, generator=generator(seed, on))] = first + consecutive_groups(images, group_size)
        groups.append(own)
        first = int(own.max()) + 1
    return torch.cat(groups).to(task.device)


def _matrix(tested: Tested, right: Mapping[int, Tensor]) -> Matrix:
    """Return the matrix (after, on) of the shares, in percent, of images that are right; NaN above the diagonal."""
    tasks, images = tested.tasks, tested.task.bincount()
    matrix = np.full((tasks, tasks), np.nan)
    for after, found in right.items():
        hits = tested.task[: len(found)][found].bincount(minlength=tasks)
        matrix[after, : after + 1] = (100 * hits / images)[: after + 1].cpu().numpy()
    return matrix
