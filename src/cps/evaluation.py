"""Evaluation: accuracy matrices of every selector and group size, from one pass over the test images.

Sealed subnetworks never change, so each test image passes each subnetwork once for the whole run; every row
"after task t" is arithmetic on that evidence, restricted to the first t + 1 subnetworks.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cps.data import all_labels, as_examples
from cps.evidence import Evidence, Outputs
from cps.learner import Learner
from cps.metrics import Matrix, summary
from cps.scenario import Task
from cps.seeds import generator
from cps.selection import Selector, consecutive_groups, select
from cps.survey import survey
from cps.views import mean_of

GROUP_SIZES = (1, 2, 5, 10, 20, 50)


@dataclass(frozen=True)
class Tested:
    """The test images of one task: evidence to select and whether the true subnetwork is right, per image."""

    evidence: Evidence
    right: Tensor
    right_of_five: Tensor | None


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
    tested = [
        _test(learner, task, index, flips=flips)
        for index, task in zip(range(len(learner.network.subnetworks)), tasks, strict=False)
    ]
    task_il = summary(_matrix(len(tested), lambda _, on: tested[on].right))
    task_il |= _top5([t.right_of_five for t in tested])
    selectors = selectors or learner.selectors
    named = selectors if isinstance(selectors, Mapping) else {selector.name: selector for selector in selectors}
    class_il = {
        name: {str(size): _class_il(learner, selector, tested, size, seed) for size in group_sizes}
        for name, selector in named.items()
    }
    return {"task_il": task_il, "class_il": class_il}


def _test(learner: Learner, task: Task, index: int, *, flips: bool) -> Tested:
    """Pass the test images of a task through every subnetwork, when it is asked for its outputs."""
    network = learner.network
    examples = as_examples(task.test, network.subnetworks[index].local, workers=learner.workers)
    evidence = survey(network, examples, learner.fabric)
    if flips:
        evidence = _averaged(evidence, survey(network, examples, learner.fabric, mirrored=True))
    evidence.ask(range(len(evidence)))
    logits = evidence[index].logits
    labels = all_labels(examples).to(logits.device)
    five = None
    if logits.shape[1] > 5:
        five = (logits.topk(5, dim=1).indices == labels[:, None]).any(dim=1)
    return Tested(evidence, logits.argmax(dim=1) == labels, five)


def _class_il(
    learner: Learner, selector: Selector, tested: Sequence[Tested], group_size: int, seed: int
) -> dict[str, object]:
    statistics = learner.network.statistics(selector.name)
    groups = [_shuffled_groups(len(t.right), group_size, seed, on).to(t.right.device) for on, t in enumerate(tested)]

    def is_selected(after: int, on: int) -> Tensor:
        known = tested[on].evidence.until(after + 1)
        return select(selector, known, statistics[: after + 1], groups[on]) == on

    tasks = len(tested)
    selected = {(after, on): is_selected(after, on) for after in range(tasks) for on in range(after + 1)}
    accuracy = _matrix(tasks, lambda after, on: selected[after, on] & tested[on].right)
    selection = _matrix(tasks, lambda after, on: selected[after, on])
    five = [
        None if t.right_of_five is None else t.right_of_five & selected[tasks - 1, on] for on, t in enumerate(tested)
    ]
    return {**summary(accuracy), **_top5(five), "selection": summary(selection)["accuracy"]}


def _top5(right: Sequence[Tensor | None]) -> dict[str, float]:
    known = [100 * float(r.float().mean()) for r in right if r is not None]
    return {"top5": sum(known) / len(known)} if known and len(known) == len(right) else {}


def _averaged(first: Evidence, second: Evidence) -> Evidence:
    """Return the mean of the evidence of two views of the same images."""

    def mean(tasks: Sequence[int]) -> list[Outputs]:
        views = zip(first.ask(tasks), second.ask(tasks), strict=True)
        return [Outputs(*(mean_of(parts) for parts in zip(*both, strict=True))) for both in views]

    return Evidence(mean, len(first))


def _shuffled_groups(images: int, group_size: int, seed: int, on: int) -> Tensor:
    """Return the group of each image, drawn at random."""
    groups = torch.empty(images, dtype=torch.long)
    groups[torch.randperm(images, generator=generator(seed, on))] = consecutive_groups(images, group_size)
    return groups


def _matrix(tasks: int, entry) -> Matrix:
    """Return the matrix (after, on) of the shares, in percent, of images that are right; NaN above the diagonal."""
    matrix = np.full((tasks, tasks), np.nan)
    for after in range(tasks):
        for on in range(after + 1):
            matrix[after, on] = 100 * float(entry(after, on).float().mean())
    return matrix
