"""Dead channels: outputs of layers that the features do not depend on, found by backpropagation."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cps.network.masks import per_output
from cps.network.partition import layer_of
from cps.pruning.activations import output_channel_axis

Channels = dict[str, Tensor]  # a bool for each output of each layer

CHANGED_IMAGES = 8  # of a batch, those that change most, on which the channels that cause it are found
IMAGES_TO_REVISE = 24  # passes of these images at most
MAX_PASSES, MIN_IMAGES = 6, 512  # passes of all images, or of fewer ones this many images in total


@torch.no_grad()
def find_dead_channels(backbone: nn.Module, weights: dict[str, Tensor], batches: Sequence[Tensor]) -> Channels:
    """Return for each shared layer which of its outputs the features do not depend on, as bools (out,).

    A channel that nothing reads has a gradient of exactly zero, whatever the module does between the channel and the
    features. So the channels without a gradient on the first batch are removed, and usually no feature changes.

    A ReLU that is off or a saturated activation has a zero gradient too, but may change the features once its channel
    is removed. Then the gradients of the images whose features change decide, with the dead channels and without. If
    the features still change, the layers that cause it keep all of their channels. After six passes over the images all
    layers do.
    """
    backbone.eval()
    gradients, features = _max_gradients(backbone, weights, batches[:1])
    features += [_forward(backbone, weights, pixels) for pixels in batches[1:]]
    none = {name: torch.zeros(len(weight), dtype=torch.bool, device=weight.device) for name, weight in weights.items()}
    dead = {**none, **{name: gradient == 0 for name, gradient in gradients.items()}}
    number = sum(map(len, batches))
    removal = _Removal(backbone, weights, batches, features, images_left=max((MAX_PASSES - 1) * number, MIN_IMAGES))
    while (changed := removal.find_changed(dead)) is not None:
        if removal.images_left < number + len(changed) * IMAGES_TO_REVISE:
            return none
        dead = {**none, **removal.revise(dead, changed)}
    return dead


class _Removal:
    """Compares features before and after the removal of channels; `images_left` counts down the images that pass."""

    def __init__(
        self,
        backbone: nn.Module,
        weights: dict[str, Tensor],
        batches: Sequence[Tensor],
        features: Sequence[Tensor],
        *,
        images_left: int,
    ):
        self.backbone, self.weights, self.batches, self.features = backbone, weights, batches, features
        self.images_left = images_left
        self._first = 0  # the batch to start with: the last one whose features changed

    def find_changed(self, channels: Channels) -> Tensor | None:
        """Return the images of a batch whose features change most, or None if no feature of any image changes."""
        for index in (*range(self._first, len(self.batches)), *range(self._first)):
            pixels, before = self.batches[index], self.features[index]
            after = self._forward(channels, pixels)
            if not _are_close(after, before):
                self._first = index
                number = max(1, min(CHANGED_IMAGES, len(pixels) // 16))
                change = (after - before).abs().amax(dim=1).nan_to_num(nan=torch.inf)
                return pixels[change.topk(number).indices]
        return None

    def revise(self, channels: Channels, images: Tensor) -> Channels:
        """Return those of the channels that can be removed without a change of the features of the images."""
        for weights in (self.weights, None):
            weights = weights or _without(self.weights, channels)
            gradients, _ = _max_gradients(self.backbone, weights, [images])
            self.images_left -= len(images)
            channels = channels | {name: channels[name] & (gradient == 0) for name, gradient in gradients.items()}
        names = self._find_removable_layers(channels, images)
        return {name: channels[name] for name in names}

    def _find_removable_layers(self, channels: Channels, images: Tensor) -> list[str]:
        """Return layers whose channels do not change the features of the given images.

        Few layers cause a change, so they are found by bisection. Layers that are still in doubt when the images have
        passed too often are left out.
        """
        features, last = self._forward({}, images), self.images_left - len(images) * (IMAGES_TO_REVISE - 3)
        found, in_doubt = [], [[name for name, mask in channels.items() if mask.any()]]
        while in_doubt and self.images_left > last:
            names = in_doubt.pop(0)
            if _are_close(self._forward({name: channels[name] for name in names}, images), features):
                found += names
            elif len(names) > 1:
                in_doubt += [names[: len(names) // 2], names[len(names) // 2 :]]
        return found

    def _forward(self, channels: Channels, pixels: Tensor) -> Tensor:
        self.images_left -= len(pixels)
        return _forward(self.backbone, _without(self.weights, channels), pixels)


def _are_close(after: Tensor, before: Tensor) -> bool:
    largest = before.abs().max().nan_to_num(nan=0.0, posinf=0.0)
    return torch.allclose(after, before, rtol=1e-3, atol=1e-5 * float(largest))


def _forward(backbone: nn.Module, weights: dict[str, Tensor], pixels: Tensor) -> Tensor:
    return functional_call(backbone, weights, (pixels.clone(),))


def _without(weights: dict[str, Tensor], channels: Channels) -> dict[str, Tensor]:
    """Return the weights with zeros in the rows of some output channels."""
    return weights | {
        name: weights[name].masked_fill(per_output(mask, weights[name].ndim), 0.0) for name, mask in channels.items()
    }


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
