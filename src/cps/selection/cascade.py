"""The cascade: a selector for single images, which asks task after task "yours, or a later one's?".

Sealed subnetworks never change, so when a task is learned its images can pass through every earlier subnetwork as
well: they are true examples of what is not theirs. What is kept of them are sums over images: the mean of each class
and one covariance, of the features in all subnetworks so far. From these each stage tells the classes of its task from
those of all later tasks, every class being taken for a normal distribution.
"""

import weakref
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from cps.network.outputs import Evidence, Outputs, pair_outputs
from cps.network.subnetwork import Subnetwork
from cps.runtime.cuda_graphs import Captured
from cps.selection.base import Statistics
from cps.selection.components import components_of, evened
from cps.selection.groups import mean_by_group
from cps.storage.settings_codec import NumericSettings, setting

HALVED_AT = 4  # tasks before one that has half the numbers of the first
FEWEST = 4  # numbers of a task
FEW = 256  # images up to which a GPU takes longer to start the work on them than to do it

_READY: MutableMapping[Tensor, dict[Any, Any]] = WeakTensorKeyDictionary()  # by the last task's means and the settings
_GRAPHS: MutableMapping[Tensor, dict[Any, Any]] = WeakTensorKeyDictionary()  # by the first task's, likewise


@setting
@dataclass(frozen=True)
class Cascade(NumericSettings):
    """The task that accepts an image after all earlier ones have rejected it, and whose head answers most strongly.

    `size` is the number of principal components of the first subnetwork's features; later subnetworks get fewer, so
    that the statistics of fifty tasks stay small. `shrinkage` regularises the covariances. `covariance_pooling`
    interpolates between separate covariances for a task and its later tasks (0) and one pooled covariance (1).
    `mean_contraction` moves class means towards their centre in the features of their own subnetwork, since training
    images are further apart there than new ones. `temperature` softens the stages, and `logit_weight` weighs the
    maximum logit, standardised by that of the task's own images.
    """

    RENAMED: ClassVar = {"own": "logit_weight", "alike": "covariance_pooling", "closer": "mean_contraction"}

    size: int = 64
    shrinkage: float = 0.01
    temperature: float = 3.0
    logit_weight: float = 1.0
    covariance_pooling: float = 1.0
    mean_contraction: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("size", self.size >= 1, must="1 or more")
        self._require("shrinkage", self.shrinkage > 0, must="above 0")
        self._require("temperature", self.temperature > 0, must="above 0")
        self._require("logit_weight", self.logit_weight >= 0, must="0 or more")
        self._require("covariance_pooling", 0 <= self.covariance_pooling <= 1, must="in [0, 1]")
        self._require("mean_contraction", 0 < self.mean_contraction <= 1, must="in (0, 1]")

    @property
    def name(self) -> str:
        """What the selector is called."""
        return "Cascade"

    def observe(
        self, subnetwork: Subnetwork, evidence: Evidence, labels: Tensor, earlier: Sequence[Statistics]
    ) -> Statistics:
        """Keep the components of the new features, and means and covariance of the classes in all subnetworks."""
        every = list(evidence)  # together, so that images are read once
        components = components_of(evened(every[-1].features), self._size(len(earlier)))
        seen = _seen(every, [*(kept["components"] for kept in earlier), components])  # (images, numbers)
        images_of = F.one_hot(labels, len(subnetwork.classes)).to(seen.dtype)  # (images, classes)
        means = images_of.T @ seen / images_of.sum(dim=0).clamp(min=1)[:, None]
        apart = seen - means[labels]
        largest = every[-1].logits.amax(dim=1)
        deviation = largest.std(correction=0).clamp(min=1e-3).maximum(largest.mean().abs() / 10)  # of few images, too
        return {
            "components": components,
            "means": means,
            "covariance": _packed(apart.T @ apart / len(seen)),
            "level": torch.stack([largest.mean(), deviation]),
        }

    def __call__(self, evidence: Evidence, statistics: Sequence[Statistics], groups: Tensor) -> Tensor:
        """Return the logarithm of each task's probability, up to a constant, averaged over each group."""
        every, ready = list(evidence), self._kept_ready(statistics)
        is_launched = groups.is_cuda and len(groups) <= FEW
        scores = self._launched(every, ready, statistics) if is_launched else self.alone(every, ready)
        return mean_by_group(scores, groups)

    def _size(self, task: int) -> int:
        """Return the numbers to look at of a task's features: fewer of later ones, which fewer stages see."""
        return max(min(self.size, FEWEST), HALVED_AT * self.size // (task + HALVED_AT))

    def _kept_ready(self, statistics: Sequence[Statistics]) -> list[Statistics]:
        """Return what `ready` does, computed once for as long as the same numbers are at hand."""
        means = [kept["means"] for kept in statistics]
        known = _READY.setdefault(means[-1], {})
        found = known.get(self)
        if (
            found is None
            or len(found[0]) != len(means)
            or any(a() is not b for a, b in zip(found[0], means, strict=True))
        ):
            found = known[self] = [weakref.ref(value) for value in means], self.ready(statistics)
        return found[1]

    def _launched(
        self, evidence: Sequence[Outputs], ready: list[Statistics], statistics: Sequence[Statistics]
    ) -> Tensor:
        """Return what `alone` does, of few images on a GPU, by a graph, which is kept for the latest task only."""

        def alone(*parts: Tensor) -> list[Tensor]:
            return [self.alone(pair_outputs(parts), ready)]

        known = _GRAPHS.setdefault(statistics[0]["means"], {})
        if self not in known or known[self][0] is not ready:
            known[self] = ready, Captured(alone)
        (scores,) = known[self][1](*(part for outputs in evidence for part in outputs))
        return scores

    def ready(self, statistics: Sequence[Statistics]) -> list[Statistics]:
        """Return, for each stage, the discriminant that tells its task's classes from all later ones."""
        means = [self._as_of_new_images(kept) for kept in statistics]
        covariances = [_unpacked(kept["covariance"], kept["means"].shape[1]) for kept in statistics]
        stages = []
        for stage, kept in enumerate(statistics):
            ready = {"components": kept["components"], "level": kept["level"]}
            numbers = means[stage].shape[1]  # those of the subnetworks up to this stage
            spreads = torch.stack([values[:numbers, :numbers] for values in covariances[stage:]])
            centres = [values[:, :numbers] for values in means[stage:]]  # (classes, numbers) of each task
            if len(centres) > 1:
                ready |= self._discriminant(centres[0], torch.cat(centres[1:]), spreads)
            stages.append(ready)
        return stages

    def _as_of_new_images(self, kept: Statistics) -> Tensor:
        """Return the means of a task's classes, closer together in the features of its own subnetwork."""
        means, before = kept["means"], kept["means"].shape[1] - kept["components"].shape[1]
        centre = means[:, before:].mean(dim=0)
        return torch.cat([means[:, :before], centre + self.mean_contraction * (means[:, before:] - centre)], dim=1)

    def _discriminant(self, own: Tensor, later: Tensor, spreads: Tensor) -> Statistics:
        """Return what gives the likelihood of each class, and how its curvature differs where spreads do."""
        common = spreads.mean(dim=0)
        middle = torch.cat([own, later]).mean(dim=0)
        own, later = own - middle, later - middle  # small numbers, since in 32 bits large ones would hide them
        ridge = (
            self.shrinkage
            * common.diagonal().mean().clamp(min=1e-6)
            * torch.eye(len(common), dtype=common.dtype, device=common.device)
        )
        if self.covariance_pooling == 1:
            weights, offsets = _linear(torch.cat([own, later]), common + ridge)
            return {"middle": middle, "weights": weights / self.temperature, "offsets": offsets / self.temperature}
        mixed = [
            self.covariance_pooling * common + (1 - self.covariance_pooling) * spread + ridge
            for spread in (spreads[0], spreads[1:].mean(dim=0))
        ]
        parts = [_linear(centres, spread) for centres, spread in zip((own, later), mixed, strict=True)]
        curvature = (torch.linalg.inv(mixed[0]) - torch.linalg.inv(mixed[1])) / 2
        weights, offsets = (torch.cat(values, dim=-1) for values in zip(*parts, strict=True))
        found = {"weights": weights, "offsets": offsets, "curvature": curvature}
        return {"middle": middle, **{name: value / self.temperature for name, value in found.items()}}

    def alone(self, evidence: Sequence[Outputs], ready: Sequence[Statistics]) -> Tensor:
        """Return the scores of images that are each a group of one, in operations that an exported graph can hold."""
        seen = _seen(evidence, [stage["components"] for stage in ready])  # (images, numbers)
        rejected = torch.zeros_like(seen[:, 0])  # the logarithm of the probability of having come so far
        scores = []
        for outputs, stage in zip(evidence, ready, strict=True):
            own = self.logit_weight * (outputs.logits.amax(dim=1) - stage["level"][0]) / stage["level"][1]
            share = outputs.logits.log_softmax(dim=1).amax(dim=1)  # of the class that would be named
            if "weights" not in stage:  # no later task is left
                scores.append(rejected + own + share)
                continue
            odds = _odds(seen, stage, outputs.logits.shape[1])
            scores.append(rejected + _log_sigmoid(odds) + own + share)
            rejected = rejected + _log_sigmoid(-odds)
        return torch.stack(scores, dim=1)

    def without(self, statistics: Sequence[Statistics], task: int) -> list[Statistics]:
        """Return what is kept about the other tasks without any number about a task that is to be forgotten."""
        sizes = [kept["components"].shape[1] for kept in statistics]
        before, size = sum(sizes[:task]), sizes[task]
        left = []
        for index, kept in enumerate(statistics):
            numbers = torch.arange(kept["means"].shape[1], device=kept["means"].device)
            stay = (numbers < before) | (numbers >= before + size)
            covariance = _unpacked(kept["covariance"], len(numbers))[stay][:, stay]
            if index != task:
                left.append({**kept, "means": kept["means"][:, stay], "covariance": _packed(covariance)})
        return left


def _seen(evidence: Sequence[Outputs], components: Sequence[Tensor]) -> Tensor:
    """Return the components of the features of each subnetwork, side by side."""
    parts = zip(evidence, components, strict=True)
    return torch.cat([evened(outputs.features) @ directions for outputs, directions in parts], dim=1)


def _linear(centres: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights (numbers, classes) and offsets of normal distributions, but for what all of one spread share."""
    weights = torch.linalg.solve(spread, centres.T)
    return weights, -(centres.T * weights).sum(dim=0) / 2 - torch.linalg.slogdet(spread).logabsdet / 2


def _odds(seen: Tensor, stage: Statistics, classes: int) -> Tensor:
    """Return the logarithm of how much likelier the first classes are than all others."""
    numbers = seen[:, : len(stage["weights"])] - stage["middle"]
    likely = numbers @ stage["weights"] + stage["offsets"]  # (images, classes)
    odds = likely[:, :classes].logsumexp(dim=1) - likely[:, classes:].logsumexp(dim=1)
    if "curvature" in stage:  # spreads differ
        odds = odds - ((numbers @ stage["curvature"]) * numbers).sum(dim=1)
    return odds


def _log_sigmoid(odds: Tensor) -> Tensor:
    """Return what torch's own gives, in operations that stay finite in an exported graph too."""
    return odds.clamp(max=0) - (1 + (-odds.abs()).exp()).log()


def _packed(matrix: Tensor) -> Tensor:
    """Return the upper half of a symmetric matrix."""
    rows, columns = torch.triu_indices(*matrix.shape, device=matrix.device).unbind()
    return matrix[rows, columns]


def _unpacked(values: Tensor, size: int) -> Tensor:
    if values.shape != (size * (size + 1) // 2,):
        raise ValueError(f"a covariance of {size} numbers has {size * (size + 1) // 2} entries, got {values.numel()}")
    matrix = values.new_zeros(size, size)
    rows, columns = torch.triu_indices(size, size, device=values.device).unbind()
    matrix[rows, columns] = values
    matrix[columns, rows] = values
    return matrix
