"""NNrelief, the pruner of the paper: keep the connections that carry most of the signal."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cps.network.masks import Masks, per_output
from cps.pruning.activations import Activations, record_activations
from cps.pruning.dead_channels import find_dead_channels
from cps.runtime.devices import as_float64
from cps.runtime.layer_calls import LayerCall
from cps.storage.settings_codec import NumericSettings, setting


@setting
@dataclass(frozen=True)
class NNrelief(NumericSettings):
    """The paper's pruner: for each neuron, keep the fewest inputs that carry a share `alpha` of its signal.

    All layers are scored on the activations of the unpruned network. The same idea gives three more rules. A filter
    whose input is zero loses its connections. Where two signals are added, a summand that carries less than 1 - alpha
    of a channel loses that channel. A channel that nothing reads is removed in the layer that computes it.
    """

    alpha: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("alpha", 0 < self.alpha <= 1, must="in (0, 1]")

    @torch.no_grad()
    def __call__(self, backbone: nn.Module, masks: Masks, batches: Sequence[Tensor]) -> Masks:
        """Return the masks of the connections that carry the signal."""
        activations = record_activations(backbone, list(masks), batches)
        weights = {name: parameter.detach() for name, parameter in backbone.named_parameters()}
        kept: Masks = {}
        for name, mask in masks.items():
            scores = importance(activations.calls[name])
            kept[name] = mask & self.keep(*scores)
        for name, weak in self._weak_branches(activations).items():
            kept[name] &= ~per_output(weak, kept[name].ndim)
        masked = {name: weights[name].masked_fill(~mask, 0.0) for name, mask in kept.items()}
        dead = find_dead_channels(backbone, masked, batches)
        return {name: mask & ~per_output(dead[name], mask.ndim) for name, mask in kept.items()}

    def keep(self, scores: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return which inputs of each neuron stay: the fewest whose scores add up to alpha of the total.

        `scores` has one row per neuron. The bias counts in the total and in the ranking, but is never pruned: it is
        private to the task, so it takes no shared weight.
        """
        rows = as_float64(scores.reshape(len(scores), -1))
        inputs = rows.shape[1]
        if bias is not None:
            rows = torch.cat([rows, as_float64(bias)[:, None]], dim=1)
        ranked, order = rows.sort(dim=1, descending=True, stable=True)
        running = ranked.cumsum(dim=1)
        before = F.pad(running[:, :-1], (1, 0))
        reached_before = before >= self.alpha * running[:, -1:] * (1 - 1e-12)  # rounding may leave a sum below alpha
        chosen = ~reached_before & (ranked > 0)
        stays = torch.zeros_like(chosen).scatter(1, order, chosen)
        # A strong bias may reach alpha by itself; a neuron with any signal keeps its strongest input.
        stays = stays[:, :inputs]
        best = F.one_hot(rows[:, :inputs].argmax(dim=1), inputs).bool() & (rows[:, :inputs] > 0)
        return (stays | (best & ~stays.any(dim=1, keepdim=True))).reshape(scores.shape).to(scores.device)

    def _weak_branches(self, activations: Activations) -> dict[str, Tensor]:
        """Return the channels of each layer that are too weak at every addition they reach.

        An addition is a neuron with two inputs, so the same rule applies: a summand is dropped if the other one
        carries alpha of the sum, that is if |branch| / |shortcut| < (1 - alpha) / alpha.
        """
        weak: dict[str, Tensor] = {}
        for addition in activations.additions.values():
            for branch, summand in zip(addition.branches, addition.sums, strict=True):
                if branch is None or not branch.is_read_once():
                    continue
                first, second = (_channel_norms(total, branch.channel_axis) for total in addition.sums)
                own = _channel_norms(summand, branch.channel_axis)
                here = (own < (1 - self.alpha) * (first + second)) & (own < torch.maximum(first, second))
                weak[branch.weight] = weak[branch.weight] & here if branch.weight in weak else here
        return weak


def importance(calls: Sequence[LayerCall]) -> tuple[Tensor, Tensor | None]:
    """Return the unnormalised importance of each connection (eq. 2), and of the bias of a `Linear` layer.

    `calls` holds each call of the layer with its mean absolute input. The result has the shape of the layer's mask.
    """
    weight = calls[0].weight.detach()
    if calls[0].convolution is not None:
        flows = sum(_squared_kernel_flow(call) for call in calls)
        return torch.as_tensor(flows).sqrt()[:, :, None, None], None
    signal = torch.stack([call.input for call in calls]).mean(dim=0)
    bias = calls[0].bias
    return weight.abs().float() * signal, None if bias is None else bias.detach().abs().float()


def _squared_kernel_flow(call: LayerCall) -> Tensor:
    """Return the squared Frobenius norm of |w_kc| * a_c for every kernel, shape (out, in).

    With the patches P_c of the map a_c and G_c = P_c P_c^T, the squared norm is |w_kc|^T G_c |w_kc|, so one product
    serves all kernels of a layer.
    """
    assert call.convolution is not None
    weight, (stride, padding, dilation, groups) = call.weight.detach(), astuple(call.convolution)
    padded = F.pad(call.input, padding)
    patches = F.unfold(padded[:, None], weight.shape[2:], dilation, stride=stride)  # type: ignore
    gram = patches @ patches.transpose(1, 2)  # (channels, kernel, kernel)
    filters = weight.abs().float().flatten(2)  # (out, in / groups, kernel)
    grouped = filters.reshape(groups, len(filters) // groups, *filters.shape[1:])
    gram = gram.reshape(groups, filters.shape[1], *gram.shape[1:])
    flow = torch.einsum("gkcu,gcuv->gkcv", grouped, gram)
    return (flow * grouped).sum(dim=-1).clamp_min(0).reshape(filters.shape[:2])


def _channel_norms(total: Tensor, channel_axis: int) -> Tensor:
    """Return the norm of each channel of a map without batch axis; `channel_axis` counts the batch axis."""
    channels = channel_axis - 1 if channel_axis > 0 else channel_axis
    return total.float().movedim(channels, 0).reshape(total.shape[channels], -1).norm(dim=1)
