"""Algorithm 2 of the paper: select the task of each image, then let that task's subnetwork classify it."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from cps.data.examples import ClassName
from cps.network.outputs import Evidence
from cps.network.shared import SharedNetwork
from cps.selection.base import ClassSelector, LazySelector, Selector, Statistics, precompute_once
from cps.selection.groups import number_of_groups
from cps.selection.rejection import check_reject, is_known

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Prediction:
    """The class of each image, the task it was found in, and how certain both are.

    `share` is the selected task's softmax share of the scores of all tasks: larger for a group of images that agree
    than for one image, and 1 if the task was given. `confidence` is the probability of the class within that task. With
    `reject`, the class of an image that resembles nothing the task has learned is None. `task_scores` and
    `task_shares` hold the selector's scores and their softmax for every task, shape (N, tasks).
    """

    classes: list[ClassName | None]
    tasks: Tensor
    share: Tensor
    confidence: Tensor
    task_scores: Tensor = field(repr=False)
    task_shares: Tensor = field(repr=False)


class Selection(NamedTuple):
    """The selected task of each image (N,), and the scores and softmax shares of all tasks (N, tasks)."""

    tasks: Tensor
    scores: Tensor
    shares: Tensor

    @property
    def share(self) -> Tensor:
        """The softmax share of each image's selected task, shape (N,)."""
        return self.shares.gather(1, self.tasks[:, None])[:, 0]


class Learned(Protocol):
    """What has learned tasks: a shared network, or any method."""

    @property
    def classes(self) -> Sequence[tuple[ClassName, ...]]:
        """The classes of each task."""
        ...

    def statistics(self, selector: str) -> Sequence[Statistics]:
        """Return what a selector of this name has kept about each task."""
        ...


def predict(
    learned: Learned, evidence: Evidence, selector: Selector, groups: Tensor, *, reject: float = 0.0
) -> Prediction:
    """Predict the class of each image from the outputs of the subnetworks; `groups[i]` is the group of image i."""
    statistics = learned.statistics(selector.name)
    run_needed(selector, evidence, statistics, groups)  # the forward pass: all subnetworks, or the likely ones
    selection = select(selector, evidence, statistics, groups)
    return classify(learned, evidence, selection, selector, reject=reject)


def run_needed(selector: Selector, evidence: Evidence, statistics: Sequence[Statistics], groups: Tensor) -> None:
    """Run the subnetworks that the selector needs, each for the images that it is needed for."""
    needed = selector.needed(evidence, statistics, groups) if isinstance(selector, LazySelector) else None
    if needed is None:
        evidence.compute()
    else:
        evidence.compute_some(needed)


def select(selector: Selector, evidence: Evidence, statistics: Sequence[Statistics], groups: Tensor) -> Selection:
    """Select for each image the task with the highest score for its group."""
    scores, groups = task_scores(selector, evidence, statistics, groups), groups.cpu()  # (groups, tasks)
    shares = task_shares(scores, torch.bincount(groups))
    return Selection(best_task(scores)[groups], scores[groups], shares[groups])


def classify(
    learned: Learned, evidence: Evidence, selection: Selection, selector: Selector, *, reject: float = 0.0
) -> Prediction:
    """Classify each image within its selected task; None if `reject` finds the image unknown."""
    tasks = selection.tasks.cpu()
    known = _known_images(learned, evidence, tasks, selector, reject).tolist()
    confidence, outputs = choose_classes(selector, evidence, learned.statistics(selector.name), tasks)
    classes: list[ClassName | None] = [
        learned.classes[task][output] if is_known else None
        for task, output, is_known in zip(tasks.tolist(), outputs.tolist(), known, strict=True)
    ]
    return Prediction(classes, tasks, selection.share.float(), confidence, selection.scores, selection.shares)


def _known_images(learned: Learned, evidence: Evidence, tasks: Tensor, selector: Selector, reject: float) -> Tensor:
    """Return for each image whether its selected task knows it."""
    check_reject(reject)
    if reject == 0:
        return torch.ones(len(tasks), dtype=torch.bool)
    if not isinstance(learned, SharedNetwork):
        raise ValueError("only subnetworks can reject unknown images; leave out reject")
    return is_known(learned, evidence, tasks, selector, reject)


def choose_classes(
    selector: Selector, evidence: Evidence, statistics: Sequence[Statistics], tasks: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the probability and the index of the best class within the task of each image, on the CPU."""
    tasks, score = tasks.cpu(), class_scorer(selector, evidence, statistics)
    confidence, outputs = torch.zeros(len(tasks), dtype=torch.float32), torch.zeros(len(tasks), dtype=torch.long)
    for task in tasks.unique().tolist():
        images = (tasks == task).nonzero()[:, 0]
        confidence[images], outputs[images] = best_class(score(task, images).cpu())
    return confidence, outputs


def class_scorer(
    selector: Selector, evidence: Evidence, statistics: Sequence[Statistics]
) -> Callable[[int, Tensor], Tensor]:
    """Return a function from a task and indices of images to scores (n, classes) of the task's classes.

    They are the selector's scores if it has an opinion on classes, else the subnetwork's logits.
    """
    if isinstance(selector, ClassSelector):
        precomputed = precompute_once(selector, statistics, evidence)
        return lambda task, images: selector.score_classes(evidence, precomputed, task, images)
    return lambda task, images: evidence.some(task, images).logits


def best_task(scores: Tensor) -> Tensor:
    """Return the task with the highest of the scores (N, tasks), ignoring NaN."""
    return scores.nan_to_num(nan=-torch.inf).argmax(dim=1)


def best_class(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the softmax probability and the index of the largest of the logits (N, classes)."""
    confidence, index = logits.softmax(dim=1).max(dim=1)
    return confidence.float(), index


def task_shares(scores: Tensor, sizes: Tensor | None = None) -> Tensor:
    """Return the softmax of scores (groups, tasks): 0 for NaN, and equal shares if no score is finite.

    A score is a mean over its group. Many images are more certain than one, but their errors are correlated, so with
    `sizes` the scores are multiplied by the square root of the group's size.
    """
    if sizes is not None:
        scores = scores * sizes.sqrt()[:, None]
    return scores.nan_to_num(nan=-torch.inf, neginf=-torch.inf).softmax(dim=1).nan_to_num(nan=1 / scores.shape[1])


def task_scores(selector: Selector, evidence: Evidence, statistics: Sequence[Statistics], groups: Tensor) -> Tensor:
    """Return the selector's scores (groups, tasks) on the CPU; raise `ValueError` if its statistics are missing."""
    try:
        scores = selector(evidence, statistics, groups).cpu()
    except KeyError as error:
        raise ValueError(
            f"{selector.name} has no {error} statistics of some task; a selector must be among the learner's "
            "selectors when a task is learned"
        ) from error
    expected = number_of_groups(groups), len(evidence)
    if tuple(scores.shape) != expected:
        raise ValueError(
            f"{selector.name} must return scores of shape (groups, tasks) {expected}, got {tuple(scores.shape)}"
        )
    if scores.isnan().any():
        log.warning("%s returned NaN scores; tasks with a NaN score are not selected", selector.name)
    return scores
