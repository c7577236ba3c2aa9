"""Selectors: functions from the evidence of all subnetworks to a score for each task.

A selector may keep statistics of a task (`observe`), computed from its training images when the task is learned; it
never keeps images. Images come in groups that are assumed to share a task; a group of one assumes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from cps.network.outputs import Evidence, Outputs
from cps.network.subnetwork import Statistics, Subnetwork
from cps.selection.groups import number_of_groups


class Selector(Protocol):
    """Scores tasks. `name` is the selector's key in results and model files."""

    @property
    def name(self) -> str:
        """The selector's name."""
        ...

    def observe(
        self, subnetwork: Subnetwork, evidence: Evidence, labels: Tensor, earlier: Sequence[Statistics]
    ) -> Statistics:
        """Return the statistics to keep about a newly learned task.

        `evidence` holds the outputs of every subnetwork so far for the task's training images, the new one last.
        `earlier` holds the statistics of each earlier task; a selector that uses them is a `LinkedSelector`.
        """
        ...

    def __call__(self, evidence: Evidence, statistics: Sequence[Statistics], groups: Tensor) -> Tensor:
        """Return a score for each group and task, shape (groups, tasks); the highest score wins.

        `statistics[t]` is what `observe` returned for task t. `groups[i]` is the group of image i, from 0.
        """
        ...


def is_selector(value: object) -> bool:
    """Return True if `value` is a selector object, not a selector class."""
    return callable(value) and not isinstance(value, type) and hasattr(value, "observe")


@runtime_checkable
class GraphSelector(Protocol):
    """A selector that an exported graph can hold, since it can score every image on its own."""

    @property
    def name(self) -> str:
        """The selector's name."""
        ...

    def precompute(self, statistics: Sequence[Statistics]) -> list[Statistics]:
        """Return what `score_images` needs, computed once from the statistics: one dict of tensors per task."""
        ...

    def score_images(self, evidence: Sequence[Outputs], precomputed: Sequence[Statistics]) -> Tensor:
        """Return scores (N, tasks) of single images, in operations that an exported graph can hold."""
        ...


@runtime_checkable
class LinkedSelector(Protocol):
    """A selector whose statistics of a task depend on other tasks.

    It must be among the learner's selectors from the first task on, and `forget` lets it rewrite its statistics.
    """

    def without_task(self, statistics: Sequence[Statistics], task: int) -> list[Statistics]:
        """Return the statistics of all other tasks as they would be if `task` had never been learned."""
        ...


@dataclass(frozen=True)
class Oracle:
    """Selects the true task, which the caller gives: the upper bound of every selector (task-IL)."""

    task: int

    @property
    def name(self) -> str:
        """The selector's name."""
        return "Oracle"

    def observe(
        self, subnetwork: Subnetwork, evidence: Evidence, labels: Tensor, earlier: Sequence[Statistics]
    ) -> Statistics:
        """Keep nothing."""
        return {}

    def __call__(self, evidence: Evidence, statistics: Sequence[Statistics], groups: Tensor) -> Tensor:
        """Return log probabilities: 0 for the true task and -1e9 for all others."""
        if not 0 <= self.task < len(evidence):
            raise ValueError(f"task must be in [0, {len(evidence)}), got {self.task}")
        scores = torch.full((number_of_groups(groups), len(evidence)), -1e9, device=groups.device)
        scores[:, self.task] = 0.0
        return scores
