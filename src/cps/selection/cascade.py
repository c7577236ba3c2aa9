"""The cascade: a selector for single images that asks task after task "is it yours, or a later task's?".

Sealed subnetworks never change. So when a task is learned, its images also pass through every earlier subnetwork, where
they are real examples of images that do not belong there. The cascade keeps only sums over them: the mean of each class
and one covariance of the features in all subnetworks so far. From these, each stage separates the classes of its task
from those of all later tasks, modelling every class as a normal distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from cps.closed_form.spaces import root_normalize
from cps.closed_form.sums import pack, unpack
from cps.network.outputs import Evidence, Outputs, pair_outputs
from cps.network.subnetwork import Subnetwork
from cps.runtime.cuda_graphs import CapturedFunction
from cps.runtime.devices import as_float64
from cps.runtime.process_state import SELECTOR_GRAPHS
from cps.selection.base import Statistics, precompute_once
from cps.selection.groups import mean_by_group
from cps.storage.settings_codec import NumericSettings, setting

HALF_SIZE_AT = 4  # a task with this many tasks before it gets half as many components as the first
MIN_SIZE = 4  # components of any task
MAX_GRAPH_IMAGES = 256  # up to this many images, launching the kernels takes a GPU longer than running them
MAX_EXACT_FEATURES = 1024  # above this many features, principal components are found by subspace iteration ...
ITERATIONS = 8  # ... in this many passes over the images


@setting
@dataclass(frozen=True)
class Cascade(NumericSettings):
    """The task that accepts an image after all earlier ones rejected it, weighed by its maximum logit.

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
        """The selector's name."""
        return "Cascade"

    def observe(
        self, subnetwork: Subnetwork, evidence: Evidence, labels: Tensor, earlier: Sequence[Statistics]
    ) -> Statistics:
        """Keep principal components of the new features, and class means and a covariance over all subnetworks."""
        outputs = evidence.compute()
        components = principal_components(root_normalize(outputs[-1].features), self._size(len(earlier)))
        reduced = _project(outputs, [*(kept["components"] for kept in earlier), components])  # (images, dims)
        one_hot = F.one_hot(labels, len(subnetwork.classes)).to(reduced.dtype)  # (images, classes)
        means = one_hot.T @ reduced / one_hot.sum(dim=0).clamp(min=1)[:, None]
        centred = reduced - means[labels]
        largest = outputs[-1].logits.amax(dim=1)
        # The floor keeps the deviation of a few images from being too small.
        deviation = largest.std(correction=0).clamp(min=1e-3).maximum(largest.mean().abs() / 10)
        return {
            "components": components,
            "means": means,
            "covariance": pack(centred.T @ centred / len(reduced)),
            "level": torch.stack([largest.mean(), deviation]),
        }

    def __call__(self, evidence: Evidence, statistics: Sequence[Statistics], groups: Tensor) -> Tensor:
        """Return the log probability of each task, up to a constant, averaged over each group."""
        outputs, precomputed = evidence.compute(), precompute_once(self, statistics)
        if groups.is_cuda and len(groups) <= MAX_GRAPH_IMAGES:
            scores = self._score_by_graph(outputs, precomputed, statistics)
        else:
            scores = self.score_images(outputs, precomputed)
        return mean_by_group(scores, groups)

    def _size(self, task: int) -> int:
        """Return the number of components of a task; later tasks, which fewer stages use, get fewer."""
        return max(min(self.size, MIN_SIZE), HALF_SIZE_AT * self.size // (task + HALF_SIZE_AT))

    def _score_by_graph(
        self, evidence: Sequence[Outputs], precomputed: list[Statistics], statistics: Sequence[Statistics]
    ) -> Tensor:
        """Return `score_images` of a few images on a GPU by a CUDA graph, cached for the latest task only."""

        def score(*parts: Tensor) -> list[Tensor]:
            return [self.score_images(pair_outputs(parts), precomputed)]

        known = SELECTOR_GRAPHS.setdefault(statistics[0]["means"], {})
        if self not in known or known[self][0] is not precomputed:
            known[self] = precomputed, CapturedFunction(score)
        (scores,) = known[self][1](*(part for outputs in evidence for part in outputs))
        return scores

    def precompute(self, statistics: Sequence[Statistics]) -> list[Statistics]:
        """Return the discriminant of each stage, which separates its task's classes from all later ones."""
        means = [self._contract_means(kept) for kept in statistics]
        covariances = [unpack(kept["covariance"], kept["means"].shape[1]) for kept in statistics]
        stages = []
        for stage, kept in enumerate(statistics):
            # A copy: what is cached must not hold the tensor that it is cached by.
            precomputed = {"components": kept["components"], "level": kept["level"].clone()}
            dims = means[stage].shape[1]  # those of the subnetworks up to this stage
            spreads = torch.stack([values[:dims, :dims] for values in covariances[stage:]])
            centres = [values[:, :dims] for values in means[stage:]]  # (classes, dims) of each task
            if len(centres) > 1:
                precomputed |= self._discriminant(centres[0], torch.cat(centres[1:]), spreads)
            stages.append(precomputed)
        return stages

    def _contract_means(self, kept: Statistics) -> Tensor:
        """Return a task's class means, moved towards their centre in the features of its own subnetwork."""
        means, before = kept["means"], kept["means"].shape[1] - kept["components"].shape[1]
        centre = means[:, before:].mean(dim=0)
        return torch.cat([means[:, :before], centre + self.mean_contraction * (means[:, before:] - centre)], dim=1)

    def _discriminant(self, own: Tensor, later: Tensor, spreads: Tensor) -> Statistics:
        """Return linear weights and offsets of each class, and a quadratic term if covariances are not pooled."""
        common = spreads.mean(dim=0)
        middle = torch.cat([own, later]).mean(dim=0)
        own, later = own - middle, later - middle  # centred, since float32 would lose small differences of large values
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

    def score_images(self, evidence: Sequence[Outputs], precomputed: Sequence[Statistics]) -> Tensor:
        """Return the log probability of each task for each image, up to a constant, shape (N, tasks)."""
        reduced = _project(evidence, [stage["components"] for stage in precomputed])  # (images, dims)
        rejected = torch.zeros_like(reduced[:, 0])  # log probability that all earlier stages rejected the image
        scores = []
        for outputs, stage in zip(evidence, precomputed, strict=True):
            own = self.logit_weight * (outputs.logits.amax(dim=1) - stage["level"][0]) / stage["level"][1]
            confidence = outputs.logits.log_softmax(dim=1).amax(dim=1)  # of the class that would be predicted
            if "weights" not in stage:  # the last task
                scores.append(rejected + own + confidence)
                continue
            odds = _log_odds(reduced, stage, outputs.logits.shape[1])
            scores.append(rejected + _log_sigmoid(odds) + own + confidence)
            rejected = rejected + _log_sigmoid(-odds)
        return torch.stack(scores, dim=1)

    def without_task(self, statistics: Sequence[Statistics], task: int) -> list[Statistics]:
        """Return the statistics of the other tasks without the dimensions that belong to `task`."""
        sizes = [kept["components"].shape[1] for kept in statistics]
        before, size = sum(sizes[:task]), sizes[task]
        left = []
        for index, kept in enumerate(statistics):
            dims = torch.arange(kept["means"].shape[1], device=kept["means"].device)
            stay = (dims < before) | (dims >= before + size)
            covariance = unpack(kept["covariance"], len(dims))[stay][:, stay]
            if index != task:
                left.append({**kept, "means": kept["means"][:, stay], "covariance": pack(covariance)})
        return left

    def without_class(self, statistics: Statistics, index: int) -> Statistics:
        """Return the statistics of a task without the mean of one of its classes."""
        stay = torch.arange(len(statistics["means"]), device=statistics["means"].device) != index
        return {**statistics, "means": statistics["means"][stay]}


def principal_components(features: Tensor, size: int) -> Tensor:
    """Return at most `size` directions of largest variance, shape (features, size)."""
    centred = features - features.mean(dim=0)
    if centred.shape[1] <= MAX_EXACT_FEATURES:
        return _largest_eigenvectors(centred, size)
    basis = _dominant_subspace(centred, min(2 * size, centred.shape[1]))
    return basis @ _largest_eigenvectors(centred @ basis, size)


def _largest_eigenvectors(centred: Tensor, size: int) -> Tensor:
    _, eigenvectors = torch.linalg.eigh(as_float64(centred.T @ centred))
    return eigenvectors.flip(1)[:, :size].to(centred).contiguous()


def _dominant_subspace(centred: Tensor, size: int) -> Tensor:
    """Return an orthonormal basis that nearly contains the first components, without forming the covariance."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(centred.shape[1], size, dtype=torch.float32, generator=generator).to(centred)
    for _ in range(ITERATIONS):
        wider, _ = torch.linalg.qr(as_float64(centred.T @ (centred @ basis)))
        basis = wider.to(centred)
    return basis


def _project(evidence: Sequence[Outputs], components: Sequence[Tensor]) -> Tensor:
    """Return the components of every subnetwork's features side by side, shape (images, dims)."""
    parts = zip(evidence, components, strict=True)
    return torch.cat([root_normalize(outputs.features) @ directions for outputs, directions in parts], dim=1)


def _linear(centres: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights (dims, classes) and offsets of normal log densities, less the term that is common to all."""
    weights = torch.linalg.solve(covariance, centres.T)
    return weights, -(centres.T * weights).sum(dim=0) / 2 - torch.linalg.slogdet(covariance).logabsdet / 2


def _log_odds(reduced: Tensor, stage: Statistics, classes: int) -> Tensor:
    """Return the log odds of the stage's own classes, which come first, against all later classes."""
    centred = reduced[:, : len(stage["weights"])] - stage["middle"]
    likelihoods = centred @ stage["weights"] + stage["offsets"]  # (images, classes)
    odds = likelihoods[:, :classes].logsumexp(dim=1) - likelihoods[:, classes:].logsumexp(dim=1)
    if "curvature" in stage:  # covariances are not pooled
        odds = odds - ((centred @ stage["curvature"]) * centred).sum(dim=1)
    return odds


def _log_sigmoid(odds: Tensor) -> Tensor:
    """Return `F.logsigmoid(odds)` in operations that stay finite in an exported graph."""
    return odds.clamp(max=0) - (1 + (-odds.abs()).exp()).log()
