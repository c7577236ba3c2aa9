"""Heads that grow with the number of classes, and corrections of their preference for new classes."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cps.data.augmentation import Flip
from cps.network.classifier import make_head
from cps.network.freezing import Guard, Protected
from cps.storage.settings_codec import contains_setting

if TYPE_CHECKING:
    from cps.methods.single_head import SingleHead


@torch.no_grad()
def grow_linear(head: nn.Linear | None, features: int, outputs: int, draws: torch.Generator) -> nn.Linear:
    """Return a head with `outputs` outputs more, the old ones unchanged; `head` is None for the first task."""
    new = make_head(features, outputs, draws)
    if head is None:
        return new
    grown = nn.Linear(features, head.out_features + outputs, device=head.weight.device, dtype=head.weight.dtype)
    old = widen_linear(head, features, draws)
    grown.weight.copy_(torch.cat([old.weight, new.weight.to(head.weight)]))
    grown.bias.copy_(torch.cat([head.bias, new.bias.to(head.bias)]))
    return grown


@torch.no_grad()
def widen_linear(head: nn.Linear, features: int, draws: torch.Generator) -> nn.Linear:
    """Return a head for more features: the weights of the known ones, which come first, are unchanged."""
    if features == head.in_features:
        return head
    wide = make_head(features, head.out_features, draws).to(head.weight)
    wide.weight[:, : head.in_features] = head.weight
    wide.bias.copy_(head.bias)
    return wide


@torch.no_grad()
def guard_rows(module: nn.Module, rows: int, *, prefix: str = "head.") -> Guard:
    """Return a guard of the first rows of all parameters of a module, by default the head of a classifier."""
    guard = {}
    for name, value in module.named_parameters():
        taken = torch.zeros_like(value, dtype=torch.bool)
        taken[:rows] = True
        guard[f"{prefix}{name}"] = Protected(taken, value.detach().clone(), torch.zeros_like(taken))
    return guard


@torch.no_grad()
def align_weights(head: nn.Linear, old: int) -> float:
    """Scale the weights of the classes after the first `old` ones to the mean length of those; return the factor.

    Zhao et al. (2020), weight aligning. Biases stay. The best class among the new ones stays the same, without biases.
    """
    lengths = head.weight.norm(dim=1)
    factor = float(lengths[:old].mean() / lengths[old:].mean())
    head.weight[old:] *= factor
    return factor


def nearest_mean_scores(features: Tensor, means: Tensor) -> Tensor:
    """Return minus the squared distances (N, classes) of features of unit length to class means of unit length."""
    points, centres = F.normalize(features, dim=1), F.normalize(means, dim=1)
    return 2 * points @ centres.T - 2


def exemplar_means(method: "SingleHead") -> Tensor:
    """Return the mean features (classes, d) of the exemplars of each class, features and means of unit length.

    With flips among its augmentation, the mirror images count, too.
    """
    examples = method.exemplars.examples()
    assert examples is not None
    views = (False, True) if contains_setting(method.augment, Flip) else (False,)
    labels = examples.targets.to(method.device)
    means = torch.zeros(method.num_classes, method.num_features, device=method.device)
    for flipped in views:
        means.index_add_(0, labels, F.normalize(method.features_of(examples, flipped=flipped), dim=1))
    return F.normalize(means, dim=1)
