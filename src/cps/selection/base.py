"""Selectors: functions from the evidence of all subnetworks to a score for each task.

A selector may keep statistics of a task (`observe`), computed from its training images when the task is learned; it
never keeps images. Images come in groups that are assumed to share a task; a group of one assumes nothing.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from cps.network.outputs import Evidence
from cps.network.subnetwork import Statistics, Subnetwork
from cps.runtime.process_state import PRECOMPUTED, PRECOMPUTED_LOCK
from cps.selection.groups import number_of_groups

MAX_PRECOMPUTED = 16  # networks, and numbers of tasks of them, whose precomputed values are kept


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

    def score_images(self, evidence: Evidence, precomputed: Sequence[Statistics]) -> Tensor:
        """Return scores (N, tasks) of single images, in operations that an exported graph can hold."""
        ...


@runtime_checkable
class ClassSelector(GraphSelector, Protocol):
    """A selector with an opinion on the class, too: the class is chosen by its scores instead of the logits."""

    def score_classes(self, evidence: Evidence, precomputed: Sequence[Statistics], task: int) -> Tensor:
        """Return log probabilities (N, classes) of the classes of a task, up to a constant, for single images.

        An exported graph must be able to hold its operations.
        """
        ...

    def score_pairs(
        self, evidence: Evidence, precomputed: Sequence[Statistics], images: Tensor, tasks: Tensor
    ) -> Tensor:
        """Return the same (n, most classes) for pairs of an image and a task, given as indices.

        The rows of a task with fewer classes than others end in minus infinity.
        """
        ...


@runtime_checkable
class LazySelector(Protocol):
    """A selector that does not always need every subnetwork."""

    def needed(self, evidence: Evidence, statistics: Sequence[Statistics], groups: Tensor) -> Tensor | None:
        """Return which subnetworks must run for which images, a bool tensor (N, tasks), or None for all."""
        ...


@runtime_checkable
class PartialClassSelector(ClassSelector, Protocol):
    """A selector that can score the classes of a task whose subnetwork has not run, if less well."""

    def score_classes_without_subnetwork(
        self, evidence: Evidence, precomputed: Sequence[Statistics], task: int, images: Tensor
    ) -> Tensor:
        """Return what is known of the log probabilities (n, classes) of `score_classes` without the subnetwork."""
        ...


@runtime_checkable
class LinkedSelector(Protocol):
    """A selector whose statistics of a task depend on other tasks.

    It must be among the learner's selectors from the first task on, and `forget` lets it rewrite its statistics.
    """

    def without_task(self, statistics: Sequence[Statistics], task: int) -> list[Statistics]:
        """Return the statistics of all other tasks as they would be if `task` had never been learned."""
        ...


@runtime_checkable
class HeldOutSelector(Protocol):
    """A selector that also keeps statistics of images that were held out of the training of a task."""

    def observe_held_out(self, evidence: Evidence, labels: Tensor, statistics: Sequence[Statistics]) -> Statistics:
        """Return statistics to keep besides those of `observe`, which are the last of `statistics`.

        `evidence` holds the outputs of every subnetwork so far for the held-out images of the latest task.
        """
        ...


@runtime_checkable
class OpenSetSelector(Protocol):
    """A selector with a space in which images of unknown classes are far from all classes, for `reject`.

    Both methods return the relative distance of images (N,), which is small for unknown ones, or None if the selector
    cannot tell it.
    """

    def relative_distances(self, evidence: Evidence, statistics: Sequence[Statistics]) -> Tensor | None:
        """Return the relative distances of new images."""
        ...

    def leave_one_out_distances(
        self, evidence: Evidence, labels: Tensor, statistics: Sequence[Statistics], images: Tensor
    ) -> Tensor | None:
        """Return the relative distances of some training images of the latest task, each without itself.

        The arguments are those of `observe`, but `statistics` includes those of the latest task. `images` are indices.
        """
        ...


@runtime_checkable
class GrowingSelector(Protocol):
    """A selector that keeps sums over images, to which images of known classes can be added."""

    def add_images(self, statistics: Sequence[Statistics], task: int, evidence: Evidence, labels: Tensor) -> Statistics:
        """Return the statistics of a task with more images of its classes, as if they had been there from the start.

        `evidence` is about these images and `labels` are their classes; `statistics` are those of all tasks.
        """
        ...


class Precomputer(Protocol):
    """Computes from the statistics of all tasks what does not change until another task is learned."""

    def precompute(self, statistics: Sequence[Statistics]) -> list[Statistics]:
        """Return tensors by name for each task."""
        ...


@runtime_checkable
class ShrinkingSelector(Protocol):
    """A selector that can take a class out of its statistics of a task."""

    def without_class(self, statistics: Statistics, index: int) -> Statistics:
        """Return the statistics of a task without its class of that index; later classes move down by one."""
        ...


def precompute_once(
    selector: Precomputer, statistics: Sequence[Statistics], evidence: Evidence | None = None
) -> list[Statistics]:
    """Return `selector.precompute(statistics)`, cached for as long as the same statistics exist.

    With many tasks even finding the cached result takes time, so `evidence` remembers it, too.
    """
    if evidence is not None:
        key = selector, tuple(map(id, statistics))
        return evidence.derived(key, lambda: (statistics, precompute_once(selector, statistics)))[1]
    tensors = [value for kept in statistics for value in kept.values()]
    if not tensors:
        return selector.precompute(statistics)
    with PRECOMPUTED_LOCK:
        known = PRECOMPUTED.setdefault(tensors[-1], {})
    found = known.get(selector)
    if found is None or len(found[0]) != len(tensors) or any(map(_is_another, found[0], tensors)):
        found = known[selector] = [weakref.ref(tensor) for tensor in tensors], selector.precompute(statistics)
        with PRECOMPUTED_LOCK:
            while len(PRECOMPUTED) > MAX_PRECOMPUTED:
                del PRECOMPUTED[next(iter(PRECOMPUTED.keys()))]
    return found[1]


def _is_another(reference: Callable[[], Tensor | None], tensor: Tensor) -> bool:
    return reference() is not tensor


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

    def needed(self, evidence: Evidence, statistics: Sequence[Statistics], groups: Tensor) -> Tensor:
        """Need the subnetwork of the true task only."""
        if not 0 <= self.task < len(evidence):
            raise ValueError(f"task must be in [0, {len(evidence)}), got {self.task}")
        needed = torch.zeros(len(groups), len(evidence), dtype=torch.bool)
        needed[:, self.task] = True
        return needed

    def __call__(self, evidence: Evidence, statistics: Sequence[Statistics], groups: Tensor) -> Tensor:
        """Return log probabilities: 0 for the true task and -1e9 for all others."""
        if not 0 <= self.task < len(evidence):
            raise ValueError(f"task must be in [0, {len(evidence)}), got {self.task}")
        scores = torch.full((number_of_groups(groups), len(evidence)), -1e9, device=groups.device)
        scores[:, self.task] = 0.0
        return scores
