"""Unread channels: outputs of layers that the features do not depend on, found by backpropagation."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cps.network.masks import per_output
from cps.network.partition import layer_of
from cps.pruning.activations import channel_axis_of


@torch.no_grad()
def unread_channels(backbone: nn.Module, weights: dict[str, Tensor], batches: Sequence[Tensor]) -> dict[str, Tensor]:
    """Say which outputs of each shared layer the features do not depend on, with these weights.

    A channel that nothing reads has a gradient of exactly zero: backpropagation is the walk from the features
    to the channels, through whatever the module does on the way. An activation that is silent or saturated has a zero
    gradient too, and may wake when its channel is gone; so features and gradients are computed again without those
    channels, until none wakes. A layer where the features still change is left alone. Masks come back as (out,) bools.
    """
    slopes, features = _slopes(backbone, weights, batches)
    still = {name: torch.zeros(len(weight), dtype=torch.bool, device=weight.device) for name, weight in weights.items()}
    unread = {**still, **{name: slope == 0 for name, slope in slopes.items()}}

    def are_as_before(after: Sequence[Tensor]) -> bool:
        return all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(after, features, strict=True))

    def harmless(names: list[str]) -> list[str]:
        """Return the layers of these whose channels may go, by halving: few are in doubt."""
        left = _without(weights, {**still, **{name: unread[name] for name in names}})
        if are_as_before([functional_call(backbone, left, (pixels.clone(),)) for pixels in batches]):
            return names
        middle = len(names) // 2
        return [] if len(names) < 2 else harmless(names[:middle]) + harmless(names[middle:])

    while True:
        slopes, after = _slopes(backbone, _without(weights, unread), batches)
        if are_as_before(after):
            return unread
        woken = {name: unread[name] & (slope != 0) for name, slope in slopes.items()}
        if not any(mask.any() for mask in woken.values()):
            break
        unread |= {name: unread[name] & ~mask for name, mask in woken.items()}
    kept = harmless([name for name, mask in unread.items() if mask.any()])
    return {**still, **{name: unread[name] for name in kept}}


def _without(weights: dict[str, Tensor], channels: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights without those that make some channels."""
    return {name: w.masked_fill(per_output(channels[name], w.ndim), 0.0) for name, w in weights.items()}


def _slopes(
    backbone: nn.Module, weights: dict[str, Tensor], batches: Sequence[Tensor]
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return the largest gradient of the features at each output of each layer, and the features."""
    backbone.eval()
    slopes: dict[str, Tensor] = {}
    outputs: list[tuple[str, Tensor]] = []

    def watch_output(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
            if not output.requires_grad:  # nothing before it asks for gradients: they start here
                output = output.detach().requires_grad_()
            outputs.append((name, output))
            return output.clone()  # an activation may work in place on it

        return hook

    handles = [layer_of(backbone, name).register_forward_hook(watch_output(name)) for name in weights]
    back_and_forth, inside = _BackAndForth(backbone), {f"backbone.{name}": value for name, value in weights.items()}
    features = []
    try:
        for pixels in batches:
            outputs.clear()
            with torch.enable_grad():
                found, noted, gradients = functional_call(back_and_forth, inside, (pixels.clone(), outputs))
            features.append(found.detach())
            for (name, _), gradient in zip(noted, gradients, strict=True):
                if gradient is not None:
                    axis = channel_axis_of(layer_of(backbone, name))
                    slope = gradient.abs().transpose(axis, 0).flatten(1).amax(dim=1)
                    slopes[name] = slopes[name].maximum(slope) if name in slopes else slope
    finally:
        for handle in handles:
            handle.remove()
    return slopes, features


class _BackAndForth(nn.Module):
    """A pass forward and back in one, since layers that are checkpointed run again on the way back."""

    def __init__(self, backbone: nn.Module):
        super().__init__()
        self.backbone = backbone

    def forward(self, pixels: Tensor, outputs: list[tuple[str, Tensor]]) -> tuple[Tensor, Any, Any]:
        """Return the features, what `outputs` then holds, and the gradients of a sum of the features there."""
        found = self.backbone(pixels)
        noted = list(outputs)
        direction = torch.randn(found.shape[1], generator=torch.Generator().manual_seed(0)).to(found)
        seen = [output for _, output in noted]
        return found, noted, torch.autograd.grad((found * direction).sum(), seen, allow_unused=True)
