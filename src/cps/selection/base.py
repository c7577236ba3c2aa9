"""Selectors: functions from the evidence of all subnetworks to a score for each task.

A selector may keep numbers about a task (`observe`), computed from its training images when it is learned,
never the images. Images come in groups that are assumed to share a task; a group of one assumes nothing.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from cps.network.outputs import Evidence, Outputs
from cps.network.subnetwork import Subnetwork
from cps.selection.groups import mean_by_group, number_of_groups
from cps.storage.settings_codec import NumericSettings, setting

log = logging.getLogger(__name__)

Statistics = dict[str, Tensor]


class Selector(Protocol):
    """Anything that scores tasks. `name` is its key in results and model files."""

    @property
    def name(self) -> str:
        """What the selector is called."""
        ...

    def observe(
        self, subnetwork: Subnetwork, evidence: Evidence, labels: Tensor, earlier: Sequence[Statistics]
    ) -> Statistics:
        """Return the numbers to keep about a task that has just been sealed.

        `evidence` is that of every subnetwork so far on the task's training images; the new one is last. `earlier` is
        what was kept about each earlier task; a selector that uses it is a `LinkedSelector`.
        """
        ...

    def __call__(self, evidence: Evidence, statistics: Sequence[Statistics], groups: Tensor) -> Tensor:
        """Return a score for each group and task, shape (groups, tasks); the highest wins.

        `statistics[t]` is what `observe` returned for task t; `groups[i]` is the group of image i, from 0.
        """
        ...


def is_selector(value: object) -> bool:
    """Return True if `value` is a selector object, not a selector class."""
    return callable(value) and not isinstance(value, type) and hasattr(value, "observe")


@runtime_checkable
class GraphSelector(Protocol):
    """A selector that an exported graph can hold: `alone` scores each image by itself, shape (N, tasks).

    What can be computed beforehand from the stored numbers is done once, by `ready`.
    """

    @property
    def name(self) -> str:
        """What the selector is called."""
        ...

    def ready(self, statistics: Sequence[Statistics]) -> list[Statistics]:
        """Return the numbers that `alone` needs."""
        ...

    def alone(self, evidence: Sequence[Outputs], ready: Sequence[Statistics]) -> Tensor:
        """Return scores as a function of features, logits and numbers; control flow must not depend on them."""
        ...


@runtime_checkable
class LinkedSelector(Protocol):
    """A selector whose numbers about a task know of others, so it has to be there from the first task on."""

    def without(self, statistics: Sequence[Statistics], task: int) -> list[Statistics]:
        """Return the numbers about all other tasks, such as they are if this one was never learned."""
        ...


@setting
@dataclass(frozen=True)
class MaxOutput:
    """The task whose head gives the largest output, averaged over the group (eq. 3)."""

    @property
    def name(self) -> str:
        """What the selector is called."""
        return "MaxOutput"

    def observe(
        self, subnetwork: Subnetwork, evidence: Evidence, labels: Tensor, earlier: Sequence[Statistics]
    ) -> Statistics:
        """Keep nothing."""
        return {}

    def __call__(self, evidence: Evidence, statistics: Sequence[Statistics], groups: Tensor) -> Tensor:
        """Return the mean largest logit of each group and task."""
        return mean_by_group(self.alone(list(evidence), self.ready(statistics)), groups)

    def ready(self, statistics: Sequence[Statistics]) -> list[Statistics]:
        """Return the numbers that `alone` needs: those that are kept."""
        return list(statistics)

    def alone(self, evidence: Sequence[Outputs], ready: Sequence[Statistics]) -> Tensor:
        """Return the scores of images that are each a group of one, in operations that an exported graph can hold."""
        return torch.stack([outputs.logits.amax(1) for outputs in evidence], dim=1)


@setting
@dataclass(frozen=True)
class ImportanceSignature(NumericSettings):
    """The task whose head is excited most as it was in training (eqs. 7 and 8).

    A signature is the signed mean of weight times feature over the head's connections. As the head is
    sealed, the distance of two signatures is a weighted distance of mean features, so those are all that
    is kept. `norm` is 2 as in the paper's text, or 1, divided by the number of connections, as in its code,
    which makes heads of different sizes comparable.
    """

    norm: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm not in (1, 2):
            raise ValueError(f"norm is 1 or 2, got {self.norm}")

    @property
    def name(self) -> str:
        """What the selector is called."""
        return "ImportanceSignature" if self.norm == 2 else "ImportanceSignature-L1"

    def observe(
        self, subnetwork: Subnetwork, evidence: Evidence, labels: Tensor, earlier: Sequence[Statistics]
    ) -> Statistics:
        """Keep the mean feature vector, and how strongly the head weighs each feature."""
        weight = subnetwork.head["weight"]  # (classes, features)
        strength = weight.norm(p=self.norm, dim=0)
        if self.norm == 1:
            strength = strength / weight.numel()
        return {"mean": evidence[-1].features.mean(dim=0), "strength": strength}

    def __call__(self, evidence: Evidence, statistics: Sequence[Statistics], groups: Tensor) -> Tensor:
        """Return minus the distance between the signature of each group and that of each task."""
        grouped = [Outputs(mean_by_group(outputs.features, groups), outputs.logits) for outputs in evidence]
        return self.alone(grouped, self.ready(statistics))

    def ready(self, statistics: Sequence[Statistics]) -> list[Statistics]:
        """Return the numbers that `alone` needs: those that are kept."""
        return list(statistics)

    def alone(self, evidence: Sequence[Outputs], ready: Sequence[Statistics]) -> Tensor:
        """Return the scores of images that are each a group of one, in operations that an exported graph can hold."""
        pairs = zip(evidence, ready, strict=True)
        changes = [(outputs.features - known["mean"]) * known["strength"] for outputs, known in pairs]
        return torch.stack([-change.norm(p=self.norm, dim=1) for change in changes], dim=1)


@dataclass(frozen=True)
class Oracle:
    """The true task, told from outside: the upper bound of every selector (task-IL)."""

    task: int

    @property
    def name(self) -> str:
        """What the selector is called."""
        return "Oracle"

    def observe(
        self, subnetwork: Subnetwork, evidence: Evidence, labels: Tensor, earlier: Sequence[Statistics]
    ) -> Statistics:
        """Keep nothing."""
        return {}

    def __call__(self, evidence: Evidence, statistics: Sequence[Statistics], groups: Tensor) -> Tensor:
        """Return logarithms of probabilities: 0 for the true task and next to minus infinity for all others."""
        if not 0 <= self.task < len(evidence):
            raise ValueError(f"there is no task {self.task}: {len(evidence)} were learned, counted from 0")
        scores = torch.full((number_of_groups(groups), len(evidence)), -1e9, device=groups.device)
        scores[:, self.task] = 0.0
        return scores


class Selected(NamedTuple):
    """The task of each image, and its share of the scores of all tasks."""

    tasks: Tensor
    share: Tensor


def select(selector: Selector, evidence: Evidence, statistics: Sequence[Statistics], groups: Tensor) -> Selected:
    """Return the task of each image: the one that scores highest for its group."""
    scores, groups = task_scores(selector, evidence, statistics, groups), groups.cpu()
    tasks, shares = best_task(scores)[groups], task_shares(scores, torch.bincount(groups))[groups]
    return Selected(tasks, shares.gather(1, tasks[:, None])[:, 0])


def best_task(scores: Tensor) -> Tensor:
    """Return the task with the highest of the scores (groups, tasks), which is none whose score is NaN."""
    return scores.nan_to_num(nan=-torch.inf).argmax(dim=1)


def task_shares(scores: Tensor, sizes: Tensor | None = None) -> Tensor:
    """Return the softmax of scores (groups, tasks): none for NaN, and equal shares where no score is sound.

    A score is the mean over a group. That of many images is surer than that of one, but not by as many, since they err
    alike: it counts as much as the root of the group's size.
    """
    if sizes is not None:
        scores = scores * sizes.sqrt()[:, None]
    return scores.nan_to_num(nan=-torch.inf, neginf=-torch.inf).softmax(dim=1).nan_to_num(nan=1 / scores.shape[1])


def task_scores(selector: Selector, evidence: Evidence, statistics: Sequence[Statistics], groups: Tensor) -> Tensor:
    """Return the selector's scores (groups, tasks), on the CPU; say it in plain words if it has not seen some task."""
    try:
        scores = selector(evidence, statistics, groups).cpu()
    except KeyError as error:
        raise ValueError(
            f"{selector.name} has kept no {error} about some task; a selector must be among the learner's selectors "
            "when a task is learned"
        ) from error
    expected = number_of_groups(groups), len(evidence)
    if tuple(scores.shape) != expected:
        raise ValueError(f"{selector.name} must return scores (groups, tasks) {expected}, got {tuple(scores.shape)}")
    if scores.isnan().any():
        log.warning("%s gives scores that are no numbers; those tasks are not selected", selector.name)
    return scores
