"""Write your own pruner and selector, check them with `cps.check_pruner` and `cps.check_selector`, and compare."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import cps
from cps.experiments.recipes import digits

QUICK = "--quick" in sys.argv


@cps.setting  # registers the class, so that model files can store it
@dataclass(frozen=True)
class RandomPruner:
    """Keep a random share of the remaining connections: a baseline for every pruner."""

    keep: float = 0.5
    seed: int = 0

    def __call__(self, backbone: nn.Module, masks: cps.Masks, batches: Sequence[Tensor]) -> cps.Masks:
        generator = torch.Generator().manual_seed(self.seed)
        return {n: m & (torch.rand(m.shape, generator=generator) < self.keep).to(m.device) for n, m in masks.items()}


@cps.setting
@dataclass(frozen=True)
class Energy:
    """Score a task by the log-sum-exp of its logits, standardised by the mean and deviation on its training images."""

    name = "Energy"

    def observe(
        self,
        subnetwork: cps.Subnetwork,
        evidence: cps.Evidence,
        labels: Tensor,
        earlier: Sequence[dict[str, Tensor]],
    ) -> dict[str, Tensor]:
        energy = evidence[-1].logits.logsumexp(dim=1)
        return {"mean": energy.mean()[None], "deviation": energy.std()[None]}

    def __call__(self, evidence: cps.Evidence, statistics: Sequence[dict[str, Tensor]], groups: Tensor) -> Tensor:
        scores = []
        for outputs, kept in zip(evidence, statistics, strict=True):
            energy = (outputs.logits.logsumexp(dim=1) - kept["mean"]) / kept["deviation"]
            sums = energy.new_zeros(int(groups.max()) + 1).index_add_(0, groups, energy)
            scores.append(sums / torch.bincount(groups))
        return torch.stack(scores, dim=1)


cps.check_pruner(RandomPruner())
cps.check_selector(Energy())

recipe = digits().with_scaled_epochs(0.1 if QUICK else 0.5)
scenario = recipe.scenario(None, order=None)
for pruner in (recipe.pruner, RandomPruner()):
    torch.manual_seed(0)
    settings = {**recipe.learner_settings(), "pruner": pruner, "selectors": (cps.MaxOutput(), Energy())}
    learner = cps.Learner(recipe.backbone(), **settings)
    for task in scenario:
        learner.learn(task)
    evaluation = cps.evaluate(learner, scenario, group_sizes=[1, 20])
    print(pruner, f"task-IL {evaluation.task_il.ACC:.1f}")
    for name, by_size in evaluation.class_il.items():
        print(f"  {name}: one image {by_size[1].ACC:.1f}, groups of 20 {by_size[20].ACC:.1f}")
