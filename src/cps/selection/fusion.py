"""The default selector: a product of three experts, the shared space, the cascade and the subnetworks.

The shared space scores every class, the cascade every task, and each subnetwork the classes of its own task. How much
each expert knows depends on the training, so images that were held out of it choose the weights of the experts. The
shared space also shows which subnetworks are likely, and with many tasks only those run, so the time for an image does
not grow with the number of tasks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from cps.network.outputs import Evidence
from cps.network.subnetwork import Subnetwork
from cps.selection.base import Statistics, precompute_once
from cps.selection.cascade import Cascade
from cps.selection.groups import mean_by_group
from cps.selection.shared_space import SharedSpace
from cps.storage.settings_codec import NumericSettings, setting

WEIGHTS = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)  # to choose from on held-out images
DEFAULT_WEIGHTS = 0.1, 0.25  # without enough of them: in no run worse than the shared space alone
CHOOSING_TASKS = 20  # tasks whose held-out images choose
ENOUGH_HELD_OUT = 100  # images of all tasks together


@setting
@dataclass(frozen=True)
class Fusion(NumericSettings):
    """The task of the most probable class, by the shared space, the cascade and the class's own subnetwork.

    The log probability of a class is that in the shared space, plus `task_weight` times the log probability of its task
    by the cascade, plus `class_weight` times that of the class within its task by the subnetwork. The same sum names
    the class. Weights that are None are those of `WEIGHTS` with the smallest log loss on the held-out images of the
    tasks, or `DEFAULT_WEIGHTS` if fewer than `ENOUGH_HELD_OUT` were held out. Weights of 0 leave the shared space
    alone.

    The cascade needs the outputs of all subnetworks, and its statistics grow with every task, so with more than
    `cascade_tasks` tasks it is left out. Then only the most probable tasks run their subnetworks: as many as it takes
    for a probability of `certainty` in the shared space, and at most `most_subnetworks`. To those that do not run, all
    classes of their task are equally probable.
    """

    shared: SharedSpace = field(default=SharedSpace())
    cascade: Cascade = field(default=Cascade())
    task_weight: float | None = None
    class_weight: float | None = None
    cascade_tasks: int = 20
    certainty: float = 0.5
    most_subnetworks: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, kind in (("shared", SharedSpace), ("cascade", Cascade)):
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"{name} of Fusion must be a cps.{kind.__name__}, got {getattr(self, name)!r}")
        for name in ("task_weight", "class_weight"):
            weight = getattr(self, name)
            is_weight = isinstance(weight, int | float) and not isinstance(weight, bool) and 0 <= weight < math.inf
            self._require(name, weight is None or is_weight, must="a finite number, 0 or more, or None")
            object.__setattr__(self, name, None if weight is None else float(weight))
        self._require("cascade_tasks", self.cascade_tasks >= 0, must="0 or more")
        self._require("certainty", 0 < self.certainty <= 1, must="in (0, 1]")
        self._require("most_subnetworks", self.most_subnetworks >= 1, must="1 or more")

    @property
    def name(self) -> str:
        """The selector's name."""
        return "Fusion"

    def observe(
        self, subnetwork: Subnetwork, evidence: Evidence, labels: Tensor, earlier: Sequence[Statistics]
    ) -> Statistics:
        """Keep the statistics of the shared space and, for the first `cascade_tasks` tasks, of the cascade."""
        shared, cascade = _split(earlier)
        kept = {"shared ": self.shared.observe(subnetwork, evidence, labels, shared)}
        if len(earlier) < self.cascade_tasks and all(cascade):
            kept["cascade "] = self.cascade.observe(subnetwork, evidence, labels, cascade)
        return _join(kept) | ({FROZEN: torch.ones(1)} if subnetwork.is_frozen else {})

    def observe_held_out(self, evidence: Evidence, labels: Tensor, statistics: Sequence[Statistics]) -> Statistics:
        """Keep the log losses of the latest task's held-out images, by task weight and by class weight.

        They are about all classes so far, so later tasks are not needed to choose the weights. They need the outputs of
        all subnetworks, so only the first `CHOOSING_TASKS` tasks keep them. Without the cascade, they do not depend on
        the task weight.
        """
        if not self._chooses_weights or len(statistics) > CHOOSING_TASKS:
            return {}
        precomputed = self.precompute(statistics)
        shared, cascade = _split(precomputed)
        own = [outputs.logits for outputs in evidence]
        sizes = torch.tensor([logits.shape[1] for logits in own], device=own[0].device)
        tasks = own[0].new_zeros(len(own[0]), len(own))
        if self._uses_cascade(statistics):
            tasks = self.cascade.score_images(evidence, cascade)
        of_task = tasks.repeat_interleave(sizes, dim=1)  # (N, classes)
        of_class = torch.cat([logits.log_softmax(dim=1) for logits in own], dim=1)
        in_space = [self.shared.score_classes(evidence, shared, task) for task in range(len(own))]
        scores, classes = torch.cat(in_space, dim=1), labels + int(sizes[:-1].sum())
        losses = [
            F.cross_entropy(scores + task_weight * of_task + class_weight * of_class, classes, reduction="sum")
            for task_weight, class_weight in product(_candidates(self.task_weight), _candidates(self.class_weight))
        ]
        return {LOSSES: torch.stack(losses), HELD_OUT: torch.tensor([float(len(labels))])}

    @property
    def _chooses_weights(self) -> bool:
        return self.task_weight is None or self.class_weight is None

    def without_task(self, statistics: Sequence[Statistics], task: int) -> list[Statistics]:
        """Return the statistics of the other tasks without `task`."""
        shared, cascade = _split(statistics)
        shared = self.shared.without_task(shared, task)
        in_cascade = sum(map(bool, cascade))  # the first ones
        if task < in_cascade:
            cascade = [*self.cascade.without_task(cascade[:in_cascade], task), *cascade[in_cascade:]]
        else:
            del cascade[task]
        own = [_without_parts(kept) for index, kept in enumerate(statistics) if index != task]
        parts = zip(shared, cascade, own, strict=True)
        return [_join({"shared ": a, "cascade ": b, "": rest}) for a, b, rest in parts]

    def add_images(self, statistics: Sequence[Statistics], task: int, evidence: Evidence, labels: Tensor) -> Statistics:
        """Return the statistics of a task with more images of its classes in the sums of the shared space."""
        shared, cascade = _split(statistics)
        grown = self.shared.add_images(shared, task, evidence, labels)
        return _join({"shared ": grown, "cascade ": cascade[task], "": _without_parts(statistics[task])})

    def without_class(self, statistics: Statistics, index: int) -> Statistics:
        """Return the statistics of a task without one of its classes."""
        (shared,), (cascade,) = _split([statistics])
        parts = {"shared ": self.shared.without_class(shared, index), "": _without_parts(statistics)}
        return _join(parts | ({"cascade ": self.cascade.without_class(cascade, index)} if cascade else {}))

    def needed(self, evidence: Evidence, statistics: Sequence[Statistics], groups: Tensor) -> Tensor | None:
        """Return the most probable tasks of each image, a bool tensor (N, tasks), or None if all are needed."""
        if not precompute_once(self, statistics, evidence)[0]["weights"].any():
            return torch.zeros(len(groups), len(evidence), dtype=torch.bool)
        if self._uses_cascade(statistics) or self.certainty == 1:
            return None
        key = self, "needed", id(precompute_once(self, statistics, evidence)), tuple(groups.tolist())
        return evidence.derived(key, lambda: self._likely(evidence, statistics, groups))

    def _likely(self, evidence: Evidence, statistics: Sequence[Statistics], groups: Tensor) -> Tensor:
        """Return the most probable tasks of each image, a bool tensor (N, tasks)."""
        shared = self.shared.score_images(evidence, _split(precompute_once(self, statistics, evidence))[0])
        sizes = torch.bincount(groups).sqrt()[:, None]  # the errors of the images of a group are correlated
        probabilities = (mean_by_group(shared, groups) * sizes).softmax(dim=1)
        largest, tasks = probabilities.topk(min(self.most_subnetworks, len(statistics)), dim=1)
        before = largest.cumsum(dim=1) - largest  # the probability of all more probable tasks
        needed = torch.zeros_like(probabilities, dtype=torch.bool)
        return needed.scatter_(1, tasks, before < self.certainty)[groups]

    def __call__(self, evidence: Evidence, statistics: Sequence[Statistics], groups: Tensor) -> Tensor:
        """Return the score of each task, averaged over each group."""
        precomputed = precompute_once(self, statistics, evidence)
        needed = self.needed(evidence, statistics, groups)
        if needed is None:
            return mean_by_group(self.score_images(evidence, precomputed), groups)
        shared, _ = _split(precomputed)
        # A subnetwork that did not run says nothing: the classes of its task are equally probable to it.
        classes = (shared[0]["classes by task"] >= 0).sum(dim=1)
        scores = self.shared.score_best_classes(evidence, shared) - precomputed[0]["weights"][1] * classes.log()
        images, tasks = needed.nonzero(as_tuple=True)
        if len(images):
            scores[images, tasks] = self.score_pairs(evidence, precomputed, images, tasks).amax(dim=1)
        return mean_by_group(scores, groups)

    def precompute(self, statistics: Sequence[Statistics]) -> list[Statistics]:
        """Return what the shared space and, if it is used, the cascade precompute, and the weights."""
        shared, cascade = _split(statistics)
        parts = {"shared ": self.shared.precompute(shared)}
        if self._uses_cascade(statistics):
            parts["cascade "] = self.cascade.precompute(cascade)
        joined = [_join({name: part[task] for name, part in parts.items()}) for task in range(len(statistics))]
        joined[0]["weights"] = torch.tensor(self.weights(statistics), device=shared[0]["counts"].device)
        return _Precomputed(joined)

    def weights(self, statistics: Sequence[Statistics]) -> tuple[float, float]:
        """Return the weights of the task and of the class that these statistics lead to.

        Both are 0 if no task was trained: frozen subnetworks are closed forms of the same features.
        """
        known = [kept for kept in statistics if LOSSES in kept]
        images = sum(float(kept[HELD_OUT]) for kept in known)
        if all(FROZEN in kept for kept in statistics):
            return 0.0, 0.0
        if not self._chooses_weights or images < ENOUGH_HELD_OUT:
            task_weight, class_weight = DEFAULT_WEIGHTS
            return _or(self.task_weight, task_weight), _or(self.class_weight, class_weight)
        tasks, classes = _candidates(self.task_weight), _candidates(self.class_weight)
        if any(kept[LOSSES].shape != (len(tasks) * len(classes),) for kept in known):
            raise ValueError("Fusion can only select with the weights, given or chosen, that it learned all tasks with")
        losses = torch.stack([kept[LOSSES].cpu() for kept in known]).sum(dim=0).reshape(len(tasks), len(classes))
        best = int((losses if self._uses_cascade(statistics) else losses[:1]).argmin())
        return tasks[best // len(classes)], classes[best % len(classes)]

    def score_images(self, evidence: Evidence, precomputed: Sequence[Statistics]) -> Tensor:
        """Return the log probability of the best class of each task, up to a constant, shape (N, tasks)."""
        _, cascade = _split(precomputed)
        classes = [self.score_classes(evidence, precomputed, task).amax(dim=1) for task in range(len(precomputed))]
        scores = torch.stack(classes, dim=1)
        if not cascade[0]:
            return scores
        return scores + precomputed[0]["weights"][0] * self.cascade.score_images(evidence, cascade)

    def score_classes(self, evidence: Evidence, precomputed: Sequence[Statistics], task: int) -> Tensor:
        """Return the log probabilities (N, classes) of the classes of a task, up to a constant."""
        shared, own = self.shared.score_classes(evidence, _split(precomputed)[0], task), evidence[task].logits
        if shared.shape[1] != own.shape[1]:
            raise ValueError(f"task {task} has {own.shape[1]} classes, but statistics of {shared.shape[1]}")
        return shared + precomputed[0]["weights"][1] * own.log_softmax(dim=1)

    def score_pairs(
        self, evidence: Evidence, precomputed: Sequence[Statistics], images: Tensor, tasks: Tensor
    ) -> Tensor:
        """Return the same (n, most classes) for pairs of an image and a task; rows may end in minus infinity."""
        shared = self.shared.score_pairs(evidence, _split(precomputed)[0], images, tasks)
        weight = float(precomputed[0]["weights"][1])
        if not weight:  # minus infinity times zero is NaN, and no subnetwork needs to run
            return shared
        return shared + weight * evidence.logits_of(images, tasks).log_softmax(dim=1)

    def score_classes_without_subnetwork(
        self, evidence: Evidence, precomputed: Sequence[Statistics], task: int, images: Tensor
    ) -> Tensor:
        """Return the log probabilities (n, classes) in the shared space alone."""
        return self.shared.score_classes_without_subnetwork(evidence, _split(precomputed)[0], task, images)

    def relative_distances(self, evidence: Evidence, statistics: Sequence[Statistics]) -> Tensor | None:
        """Return the relative distances of new images in the shared space."""
        return self.shared.relative_distances(evidence, _split(statistics)[0])

    def leave_one_out_distances(
        self, evidence: Evidence, labels: Tensor, statistics: Sequence[Statistics], images: Tensor
    ) -> Tensor | None:
        """Return the same of some training images of the latest task, each without itself."""
        return self.shared.leave_one_out_distances(evidence, labels, _split(statistics)[0], images)

    def _uses_cascade(self, statistics: Sequence[Statistics]) -> bool:
        return len(statistics) <= self.cascade_tasks and all("cascade means" in kept for kept in statistics)


PARTS = ("shared ", "cascade ")  # prefixes of the statistics
LOSSES, HELD_OUT, FROZEN = "held out log losses", "held out images", "is frozen"  # keys of the others


def _candidates(weight: float | None) -> tuple[float, ...]:
    """Return the weights to choose from."""
    return WEIGHTS if weight is None else (weight,)


def _or(weight: float | None, default: float) -> float:
    return default if weight is None else weight


class _Precomputed(list[Statistics]):
    """Statistics that remember how they split, which with many tasks takes longer than a prediction."""

    @cached_property
    def parts(self) -> list[list[Statistics]]:
        """The statistics of each part."""
        return _split(list(self))


def _split(statistics: Sequence[Statistics]) -> list[list[Statistics]]:
    """Return the statistics of the shared space, and those of the cascade, of each task; empty where there are none."""
    if isinstance(statistics, _Precomputed):
        return statistics.parts
    return [[_without_prefix(part, kept) for kept in statistics] for part in PARTS]


def _without_prefix(prefix: str, kept: Mapping[str, Tensor]) -> Statistics:
    return {name.removeprefix(prefix): value for name, value in kept.items() if name.startswith(prefix)}


def _without_parts(kept: Statistics) -> Statistics:
    """Return the statistics that belong to no part."""
    return {name: value for name, value in kept.items() if not name.startswith(PARTS)}


def _join(parts: Mapping[str, Statistics]) -> Statistics:
    return {prefix + name: value for prefix, kept in parts.items() for name, value in kept.items()}
