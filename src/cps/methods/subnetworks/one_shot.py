"""The one-shot selection of SupSup: one gradient of the entropy of a mixture of all subnetworks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from cps.network.outputs import Evidence
from cps.network.shared import SharedNetwork
from cps.network.subnetwork import Statistics, Subnetwork
from cps.selection.entropy import entropy
from cps.selection.groups import mean_by_group
from cps.storage.settings_codec import setting


@dataclass(frozen=True)
class MixtureEntropy:
    """The space of `mixture_gradients` of the first `tasks` tasks, which only a method that has them can compute."""

    tasks: int

    def make(self, shape: tuple[int, ...], pretrained: Callable[[], nn.Module]) -> nn.Module:
        """Raise `ValueError`: the space is a property of a method."""
        raise ValueError("OneShot needs a method with fixed weights, such as SupSup")


@setting
@dataclass(frozen=True)
class OneShot:
    """The task whose mask lowers the entropy of a mixture of all masks fastest, averaged over the group."""

    @property
    def name(self) -> str:
        """The selector's name."""
        return "OneShot"

    def observe(
        self, subnetwork: Subnetwork, evidence: Evidence, labels: Tensor, earlier: Sequence[Statistics]
    ) -> Statistics:
        """Keep nothing."""
        return {}

    def __call__(self, evidence: Evidence, statistics: Sequence[Statistics], groups: Tensor) -> Tensor:
        """Return the score of each group and task."""
        return mean_by_group(-evidence.features(MixtureEntropy(len(evidence))), groups)


def mixture_gradients(network: SharedNetwork, batches: Sequence[Tensor], tasks: int) -> Tensor:
    """Return dH / da_t (N, tasks) at a_t = 1 / T, where H is the entropy of the outputs of a mixture of subnetworks.

    Weights and heads of the mixture are the sums of `a_t` times those of subnetwork t; everything else is that of the
    first task.
    """
    subnetworks = network.subnetworks[:tasks]
    if len({len(each.classes) for each in subnetworks}) > 1:
        raise ValueError("a mixture of heads needs tasks with equally many classes")
    backbone, private = network.backbone.eval(), subnetworks[0].private
    parts = []
    for task, subnetwork in enumerate(subnetworks):
        tensors = network.tensors_of(task)
        heads = {f"head {name}": value for name, value in subnetwork.head.items()}
        parts.append({**{name: tensors[name] for name in network.weights}, **heads})
    mixture = {name: torch.stack([part[name] for part in parts]).mean(dim=0) for name in parts[0]}

    def entropies(pixels: Tensor) -> Tensor:
        tensors = {**private, **{name: mixture[name] for name in network.weights}}
        features = functional_call(backbone, tensors, (pixels,)).float()
        return entropy(F.linear(features, mixture["head weight"], mixture["head bias"]))

    with network.in_use(), torch.inference_mode(False), torch.enable_grad():
        mixture = {name: value.clone().requires_grad_() for name, value in mixture.items()}
        directions = [[part[name] for name in mixture] for part in parts]
        return torch.cat([
            _directional_derivatives(entropies(network.pixels(images)), list(mixture.values()), directions)
            for images in batches
        ])  # fmt: skip


def _directional_derivatives(values: Tensor, at: list[Tensor], directions: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the derivative (N, directions) of each of N values that depend on the tensors `at`.

    The gradient of a weighted sum of the values is linear in the weights, and its product with a direction has the
    derivatives of the single values as its own gradient. So one backward pass for each direction serves all N.
    """
    weights = torch.ones_like(values, requires_grad=True)
    gradients = torch.autograd.grad(values, at, weights, create_graph=True, materialize_grads=True)
    found = []
    for direction in directions:
        products = [(one * other).sum().float() for one, other in zip(gradients, direction, strict=True)]
        found.append(torch.autograd.grad(torch.stack(products).sum(), weights, retain_graph=True)[0])
    return torch.stack(found, dim=1)
