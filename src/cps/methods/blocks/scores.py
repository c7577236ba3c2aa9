"""Scores of weights: a task learns which weights it uses by gradients that pass straight through its masks.

The effective weight is `W * m(s)` with a mask m of the scores s. The mask is a step, so its gradient is taken to be
that of the identity: the gradient of m is that of the effective weight times W, and it is passed on to the scores.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cps.methods.blocks.joint_optimizer import JointOptimizer
from cps.methods.blocks.subnetwork_objective import SubnetworkObjective
from cps.network.classifier import Classifier, Loss
from cps.network.masks import Masks
from cps.network.partition import trainable
from cps.storage.settings_codec import NumericSettings, setting
from cps.training.settings import MakeOptimizer, Training


class MaskRule(Protocol):
    """Makes a mask of scores."""

    def mask(self, scores: Tensor) -> Tensor:
        """Return which weights are on."""
        ...

    def ranking(self, scores: Tensor) -> Tensor:
        """Return what must grow for a weight to be switched on; gradients pass straight to it."""
        ...


@setting
@dataclass(frozen=True)
class TopShare(NumericSettings):
    """The share of the weights with the largest absolute scores is on (Ramanujan et al., CVPR 2020)."""

    share: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("share", 0 < self.share <= 1, must="in (0, 1]")

    def mask(self, scores: Tensor) -> Tensor:
        """Return a mask with exactly `round(share * n)` of n weights on, at least one."""
        number = max(1, round(self.share * scores.numel()))
        mask = torch.zeros_like(scores, dtype=torch.bool).flatten()
        mask[scores.detach().abs().flatten().topk(number).indices] = True
        return mask.reshape(scores.shape)

    def ranking(self, scores: Tensor) -> Tensor:
        """Return the absolute scores."""
        return scores.abs()


@setting
@dataclass(frozen=True)
class Above(NumericSettings):
    """The weights whose scores are above a threshold are on (Piggyback)."""

    threshold: float = 5e-3

    def mask(self, scores: Tensor) -> Tensor:
        """Return the mask."""
        return scores.detach() > self.threshold

    def ranking(self, scores: Tensor) -> Tensor:
        """Return the scores."""
        return scores


class _StraightThrough(torch.autograd.Function):
    """The values of a mask; the gradient goes to the ranking."""

    @staticmethod
    def forward(ctx: Any, ranking: Tensor, mask: Tensor) -> Tensor:
        return mask.to(ranking.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def straight_through(rule: MaskRule, scores: Tensor, mask: Tensor) -> Tensor:
    """Return the mask of scores as numbers, with gradients that pass straight through to the scores."""
    values: Any = _StraightThrough.apply(rule.ranking(scores), mask)
    return values


def uniform_scores(weights: Mapping[str, Tensor], draws: torch.Generator) -> dict[str, Tensor]:
    """Return scores for weights, drawn as their values usually are: uniform, up to one over the root of the fan-in."""
    scores = {}
    for name, weight in weights.items():
        limit = weight[0].numel() ** -0.5
        scores[name] = torch.empty(weight.shape).uniform_(-limit, limit, generator=draws).to(weight)
    return scores


def constant_scores(weights: Mapping[str, Tensor], value: float = 1e-2) -> dict[str, Tensor]:
    """Return equal scores, which start with all weights on (Piggyback)."""
    return {name: torch.full_like(weight, value) for name, weight in weights.items()}


class ScoredWeights(SubnetworkObjective):
    """Train a classifier under the masks of its scores, and the scores by an optimizer for them alone.

    `scores` and `choosable` name shared weights of the backbone; weights that are not `choosable` are always on. Those
    that are off stay as they are: weight decay would shrink them, and then the gradients of their scores.
    """

    def __init__(
        self,
        student: Classifier,
        scores: Mapping[str, Tensor],
        rule: MaskRule,
        optimizer: MakeOptimizer,
        *,
        choosable: Masks | None = None,
        freezes_norms: bool = False,
    ):
        super().__init__(student, freezes_norms=freezes_norms)
        self.names = list(scores)
        self.values = nn.ParameterList([nn.Parameter(value.clone()) for value in scores.values()])
        self.rule, self.optimizer, self.choosable = rule, optimizer, choosable
        self._on: Masks = {}  # in the last forward pass
        self._before: dict[str, Tensor] = {}

    @property
    def scores(self) -> dict[str, Tensor]:
        """The present scores."""
        return {name: value.detach() for name, value in zip(self.names, self.values, strict=True)}

    def masks(self) -> Masks:
        """Return which weights are on."""
        return {name: self._mask(name, scores) for name, scores in self.scores.items()}

    def _mask(self, name: str, scores: Tensor) -> Tensor:
        mask = self.rule.mask(scores)
        return mask if self.choosable is None else mask | ~self.choosable[name]

    def effective_weights(self) -> dict[str, Tensor]:
        """Return the weights under the masks, which gradients reach."""
        live = dict(self.student.backbone.named_parameters())
        effective = {}
        for name, scores in zip(self.names, self.values, strict=True):
            self._on[name] = self._mask(name, scores)
            mask = straight_through(self.rule, scores, self._on[name])
            if self.choosable is not None:
                mask = torch.where(self.choosable[name], mask, 1.0)
            effective[name] = live[name] * mask.to(live[name].dtype)
        return effective

    def forward(self, pixels: Tensor, labels: Tensor, loss: Loss) -> Tensor:
        """Return the loss of a batch."""
        weights = {f"backbone.{name}": value for name, value in self.effective_weights().items()}
        return functional_call(self.student, weights, (pixels, labels, loss))

    def before_step(self) -> None:
        """Keep the weights."""
        live = dict(self.student.backbone.named_parameters())
        self._before = {name: live[name].detach().clone() for name in self._on if live[name].requires_grad}

    @torch.no_grad()
    def after_step(self) -> None:
        """Restore the weights that are off."""
        live = dict(self.student.backbone.named_parameters())
        for name, before in self._before.items():
            torch.where(self._on[name], live[name].detach(), before, out=live[name].detach())
        self._before = {}

    def make_optimizer(self, training: Training) -> torch.optim.Optimizer:
        """Return the optimizer of the settings for the student, joined with that of the scores."""
        return JointOptimizer([training.optimizer(trainable(self.student).values()), self.optimizer(self.values)])
