"""Evaluation: accuracy matrices of every selector and group size, from one pass over the test images.

Sealed subnetworks never change, so each test image passes each subnetwork once for the whole run; every row
"after task t" is arithmetic on that evidence, restricted to the first t + 1 subnetworks.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from cps.data import ImageBatches, all_labels, as_examples
from cps.evidence import Evidence
from cps.learner import Learner
from cps.metrics import Matrix, summary
from cps.scenario import Task
from cps.seeds import generator
from cps.selection import Selector, consecutive_groups, select

GROUP_SIZES = (1, 2, 5, 10, 20, 50)


def evaluate(
    learner: Learner,
    tasks: Iterable[Task],
    *,
    group_sizes: Sequence[int] = GROUP_SIZES,
    selectors: Sequence[Selector] | None = None,
    seed: int = 0,
) -> dict[str, object]:
    """Return `task_il` and `class_il` of all learned tasks, in percent, as `results.json` holds them.

    Groups are drawn within a task, shuffled with the seed; the last, smaller group counts too. A group
    whose task is mistaken counts as wrong whole.
    """
    evidence, right = [], []
    for task, subnetwork in zip(tasks, learner.network.subnetworks, strict=False):
        examples = as_examples(task.test, subnetwork.local, workers=learner.workers)
        evidence.append(learner.network.evidence(ImageBatches(examples)))
        own = evidence[-1][len(evidence) - 1].logits
        right.append(own.argmax(dim=1) == all_labels(examples).to(own.device))
    task_il = _matrix(len(right), lambda after, on: right[on].float().mean())
    class_il = {}
    for selector in selectors or learner.selectors:
        class_il[selector.name] = {
            str(size): _class_il(learner, selector, evidence, right, size, seed) for size in group_sizes
        }
    return {"task_il": summary(task_il), "class_il": class_il}


def _class_il(
    learner: Learner,
    selector: Selector,
    evidence: Sequence[Evidence],
    right: Sequence[Tensor],
    group_size: int,
    seed: int,
) -> dict[str, object]:
    statistics = learner.network.statistics(selector.name)
    groups = [_shuffled_groups(len(r), group_size, seed, on).to(r.device) for on, r in enumerate(right)]

    def is_selected(after: int, on: int) -> Tensor:
        known = evidence[on].until(after + 1)
        return select(selector, known, statistics[: after + 1], groups[on]) == on

    selected = {(after, on): is_selected(after, on) for after in range(len(right)) for on in range(after + 1)}
    accuracy = _matrix(len(right), lambda after, on: (selected[after, on] & right[on]).float().mean())
    selection = _matrix(len(right), lambda after, on: selected[after, on].float().mean())
    return {**summary(accuracy), "selection": summary(selection)["accuracy"]}


def _shuffled_groups(images: int, group_size: int, seed: int, on: int) -> Tensor:
    """Return the group of each image, drawn at random."""
    groups = torch.empty(images, dtype=torch.long)
    groups[torch.randperm(images, generator=generator(seed, on))] = consecutive_groups(images, group_size)
    return groups


def _matrix(tasks: int, entry) -> Matrix:
    """Return a matrix (after, on) in percent, NaN above the diagonal."""
    matrix = np.full((tasks, tasks), np.nan)
    for after in range(tasks):
        for on in range(after + 1):
            matrix[after, on] = 100 * float(entry(after, on))
    return matrix
