"""Algorithm 2 of the paper: select the task of each image, then let that task's subnetwork classify it."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from cps.data.examples import ClassName
from cps.network.outputs import Evidence
from cps.network.shared import SharedNetwork
from cps.selection.base import (
    ClassSelector,
    LazySelector,
    PartialClassSelector,
    Selector,
    Statistics,
    precompute_once,
)
from cps.selection.groups import number_of_groups
from cps.selection.prediction import Prediction
from cps.selection.rejection import check_reject, is_known

log = logging.getLogger(__name__)


class Selection(NamedTuple):
    """The selected task of each image (N,), and the scores and softmax shares of all tasks (N, tasks).

    `log_shares` are the logarithms of the shares, up to a constant for each image.
    """

    tasks: Tensor
    scores: Tensor
    shares: Tensor
    log_shares: Tensor

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
    scaled = scores * torch.bincount(groups).sqrt()[:, None]
    return Selection(best_task(scores)[groups], scores[groups], task_shares(scaled)[groups], scaled[groups])


def classify(
    learned: Learned, evidence: Evidence, selection: Selection, selector: Selector, *, reject: float = 0.0
) -> Prediction:
    """Classify each image within its selected task; None if `reject` finds the image unknown."""
    tasks = selection.tasks.cpu()
    known = _known_images(learned, evidence, tasks, selector, reject).tolist()
    statistics, of_tasks = learned.statistics(selector.name), list(learned.classes)
    confidence, outputs = choose_classes(selector, evidence, statistics, tasks)
    classes: list[ClassName | None] = [
        of_tasks[task][output] if is_known else None
        for task, output, is_known in zip(tasks.tolist(), outputs.tolist(), known, strict=True)
    ]
    score_all = partial(
        score_all_classes,
        selector,
        evidence.without_images(len(tasks)),
        statistics,
        selection.log_shares,
        of_tasks,
    )
    return Prediction(
        classes, tasks, selection.share.float(), confidence, selection.scores, selection.shares, score_all
    )


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
    return best_class(_score_pairs(selector, evidence, statistics, torch.arange(len(tasks)), tasks).cpu())


def _score_pairs(
    selector: Selector, evidence: Evidence, statistics: Sequence[Statistics], images: Tensor, tasks: Tensor
) -> Tensor:
    """Return the scores (n, most classes) of `class_scorer` for pairs of an image and a task, given as indices."""
    if isinstance(selector, ClassSelector):
        return selector.score_pairs(evidence, precompute_once(selector, statistics, evidence), images, tasks)
    return evidence.logits_of(images, tasks)


def class_scorer(selector: Selector, evidence: Evidence, statistics: Sequence[Statistics]) -> Callable[[int], Tensor]:
    """Return a function from a task to scores (N, classes) of its classes for all images.

    They are the selector's scores if it has an opinion on classes, else the subnetwork's logits.
    """
    if isinstance(selector, ClassSelector):
        precomputed = precompute_once(selector, statistics, evidence)
        return lambda task: selector.score_classes(evidence, precomputed, task)
    return lambda task: evidence[task].logits


@torch.no_grad()
def score_all_classes(
    selector: Selector,
    evidence: Evidence,
    statistics: Sequence[Statistics],
    log_shares: Tensor,
    of_tasks: Sequence[tuple[ClassName, ...]],
) -> tuple[tuple[ClassName, ...], Tensor]:
    """Return all classes, and the log probability of each (N, classes) from the subnetworks that have run.

    `log_shares` (N, tasks) belong to the tasks, `of_tasks` are their classes. The best class of a task has the
    probability of the task, and the others are less probable by as much as they are within the task.
    """
    log_shares = log_shares.cpu().double()
    log_shares = log_shares.masked_fill(log_shares.isnan(), -torch.inf)
    classes = tuple(dict.fromkeys(name for names in of_tasks for name in names))
    column = {name: index for index, name in enumerate(classes)}
    scores = log_shares.new_full((len(log_shares), len(column)), -torch.inf)

    def add(task: int, images: Tensor, of_classes: Tensor) -> None:
        of_classes = of_classes.cpu().double()
        within = of_classes - of_classes.amax(dim=1, keepdim=True)
        places = images[:, None], torch.tensor([column[name] for name in of_tasks[task]])
        scores[places] = scores[places].maximum(log_shares[images, task, None] + within)

    is_partial = isinstance(selector, PartialClassSelector)
    for task in range(len(of_tasks)):
        has_run = torch.zeros(len(log_shares), dtype=torch.bool)
        has_run[evidence.ran(task)] = True
        images, others = has_run.nonzero()[:, 0], (~has_run).nonzero()[:, 0]
        if len(images):
            scored = _score_pairs(selector, evidence, statistics, images, torch.full_like(images, task))
            add(task, images, scored[:, : len(of_tasks[task])])
        if len(others) and is_partial:
            precomputed = precompute_once(selector, statistics, evidence)
            add(task, others, selector.score_classes_without_subnetwork(evidence, precomputed, task, others))
    return classes, scores.log_softmax(dim=1).float()


def best_task(scores: Tensor) -> Tensor:
    """Return the task with the highest of the scores (N, tasks), ignoring NaN."""
    return scores.nan_to_num(nan=-torch.inf).argmax(dim=1)


def best_class(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the softmax probability and the index of the largest of the logits (N, classes)."""
    confidence, index = logits.softmax(dim=1).max(dim=1)
    return confidence.float(), index


def task_shares(scores: Tensor) -> Tensor:
    """Return the softmax of scores (groups, tasks): 0 for NaN, and equal shares if no score is finite."""
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
