"""Dead channels: outputs of layers that the features do not depend on, found by backpropagation."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cps.network.masks import per_output
from cps.network.partition import layer_of
from cps.pruning.activations import output_channel_axis


@torch.no_grad()
def find_dead_channels(backbone: nn.Module, weights: dict[str, Tensor], batches: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return for each shared layer which of its outputs the features do not depend on, as bools (out,).

    A channel that nothing reads has a gradient of exactly zero, whatever the module does between the channel and the
    features. A ReLU that is off or a saturated activation has a zero gradient too, but may change the features once its
    channel is removed. So features and gradients are computed again without the dead channels, until no gradient
    returns. If the features still differ, the layers that cause it keep all of their channels.
    """
    gradients, features = _max_gradients(backbone, weights, batches)
    none = {name: torch.zeros(len(weight), dtype=torch.bool, device=weight.device) for name, weight in weights.items()}
    dead = {**none, **{name: gradient == 0 for name, gradient in gradients.items()}}

    def are_unchanged(after: Sequence[Tensor]) -> bool:
        return all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(after, features, strict=True))

    def removable(names: list[str]) -> list[str]:
        """Return those of the layers whose dead channels can be removed, by bisection: few layers cause a change."""
        left = _zero_channels(weights, {**none, **{name: dead[name] for name in names}})
        if are_unchanged([functional_call(backbone, left, (pixels.clone(),)) for pixels in batches]):
            return names
        middle = len(names) // 2
        return [] if len(names) < 2 else removable(names[:middle]) + removable(names[middle:])

    while True:
        gradients, after = _max_gradients(backbone, _zero_channels(weights, dead), batches)
        if are_unchanged(after):
            return dead
        revived = {name: dead[name] & (gradient != 0) for name, gradient in gradients.items()}
        if not any(mask.any() for mask in revived.values()):
            break
        dead |= {name: dead[name] & ~mask for name, mask in revived.items()}
    names = removable([name for name, mask in dead.items() if mask.any()])
    return {**none, **{name: dead[name] for name in names}}


def _zero_channels(weights: dict[str, Tensor], channels: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with zeros in the rows of some output channels."""
    return {name: w.masked_fill(per_output(channels[name], w.ndim), 0.0) for name, w in weights.items()}


def _max_gradients(
    backbone: nn.Module, weights: dict[str, Tensor], batches: Sequence[Tensor]
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return the largest absolute gradient of the features at each output of each layer, and the features."""
    backbone.eval()
    largest: dict[str, Tensor] = {}
    outputs: list[tuple[str, Tensor]] = []

    def record_output(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
            if not output.requires_grad:  # nothing before it needs gradients, so they start here
                output = output.detach().requires_grad_()
            outputs.append((name, output))
            return output.clone()  # an activation may work in place on it

        return hook

    handles = [layer_of(backbone, name).register_forward_hook(record_output(name)) for name in weights]
    module, tensors = _ForwardBackward(backbone), {f"backbone.{name}": value for name, value in weights.items()}
    all_features = []
    try:
        for pixels in batches:
            outputs.clear()
            with torch.enable_grad():
                features, recorded, gradients = functional_call(module, tensors, (pixels.clone(), outputs))
            all_features.append(features.detach())
            for (name, _), gradient in zip(recorded, gradients, strict=True):
                if gradient is not None:
                    axis = output_channel_axis(layer_of(backbone, name))
                    size = gradient.abs().transpose(axis, 0).flatten(1).amax(dim=1)
                    largest[name] = largest[name].maximum(size) if name in largest else size
    finally:
        for handle in handles:
            handle.remove()
    return largest, all_features


class _ForwardBackward(nn.Module):
    """Forward and backward pass in one call, since checkpointed layers run again in the backward pass."""

    def __init__(self, backbone: nn.Module):
        super().__init__()
        self.backbone = backbone

    def forward(self, pixels: Tensor, outputs: list[tuple[str, Tensor]]) -> tuple[Tensor, Any, Any]:
        """Return the features, the recorded outputs, and the gradients there of a random projection of the features."""
        features = self.backbone(pixels)
        recorded = list(outputs)  # before the backward pass records more
        direction = torch.randn(features.shape[1], generator=torch.Generator().manual_seed(0)).to(features)
        tensors = [output for _, output in recorded]
        return features, recorded, torch.autograd.grad((features * direction).sum(), tensors, allow_unused=True)
