"""Pad a network's channels to multiples of eight, which GPUs compute fastest.

The added channels are zero, and so are the weights that read them: they add nothing to the features, receive no
gradient, and stay zero in training. The padded copy is compared with the original on two images before it is used.
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cps.network.partition import named_tensors, trainable
from cps.runtime.devices import full_precision

MULTIPLE = 8


class PaddedBackbone(nn.Module):
    """A padded copy of a backbone (`inner`) that returns the features of the original."""

    def __init__(self, backbone: nn.Module, features: int, min_channels: int):
        super().__init__()
        self.inner = _pad_layers(backbone, min_channels)
        self.features, self.min_channels = features, min_channels

    def forward(self, pixels: Tensor) -> Tensor:
        """Return features, shape (N, d)."""
        missing = _padded_width(pixels.shape[1], self.min_channels) - pixels.shape[1]
        pixels = F.pad(pixels, (0, 0, 0, 0, 0, missing)) if missing else pixels
        return self.inner(pixels)[:, : self.features]


@torch.no_grad()
def pad_channels(backbone: nn.Module, pixels: Tensor, *, min_channels: int = 2 * MULTIPLE) -> PaddedBackbone | None:
    """Return a padded copy of a backbone, or None if padding is impossible, useless or changes the features.

    Widths below `min_channels` are not padded. With `min_channels=1` the image channels are padded too. `pixels` are
    images on which the copy is compared with the backbone.
    """
    if not _is_paddable(backbone, min_channels):
        return None
    was_training = backbone.training
    with full_precision():
        expected = backbone.eval()(pixels)
        backbone.train(was_training)
        try:
            padded = PaddedBackbone(backbone, expected.shape[1], min_channels).to(pixels.device)
            is_close = torch.allclose(padded.eval()(pixels), expected, rtol=1e-3, atol=1e-4)
        except RuntimeError:
            return None
    return padded if is_close else None


@torch.no_grad()
def copy_into(source: nn.Module, target: nn.Module) -> None:
    """Copy every tensor of `source` into `target`, as far as the shapes overlap; the rest of `target` stays."""
    values, into = named_tensors(source), named_tensors(target)
    torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
        [_crop(into[name].detach(), value.shape) for name, value in values.items()],
        [_crop(value.detach(), into[name].shape) for name, value in values.items()],
    )


def resize_optimizer_state(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return an optimizer's state with every tensor cropped, or padded with zeros, to the shape of its parameter."""
    parameters = list(trainable(model).values())

    def resize(value: Any, parameter: Tensor) -> Any:
        if not isinstance(value, Tensor) or value.ndim != parameter.ndim:
            return value
        resized = torch.zeros_like(parameter, dtype=value.dtype, requires_grad=False)
        _crop(resized, value.shape).copy_(_crop(value, parameter.shape))
        return resized

    resized = {
        index: {key: resize(value, parameters[index]) for key, value in entries.items()}
        for index, entries in state["state"].items()
    }
    return {**state, "state": resized}


def _is_paddable(backbone: nn.Module, min_channels: int) -> bool:
    """Return True if padding changes some width and every layer with parameters can be padded."""
    layers = [module for module in backbone.modules() if next(module.parameters(recurse=False), None) is not None]
    can_pad_all = all(
        isinstance(layer, nn.BatchNorm2d) or (isinstance(layer, nn.Conv2d) and layer.groups == 1) for layer in layers
    )
    widths = [layer.out_channels for layer in layers if isinstance(layer, nn.Conv2d)]
    return can_pad_all and any(width != _padded_width(width, min_channels) for width in widths)


def _padded_width(channels: int, min_channels: int) -> int:
    return channels if channels < min_channels else -(-channels // MULTIPLE) * MULTIPLE


def _pad_layers(backbone: nn.Module, min_channels: int) -> nn.Module:
    """Return a copy with every convolution and batch norm layer padded with zeros."""
    padded = copy.deepcopy(backbone)
    for module in padded.modules():
        if isinstance(module, nn.Conv2d):
            module.in_channels = _padded_width(module.in_channels, min_channels)
            module.out_channels = _padded_width(module.out_channels, min_channels)
            _pad_tensor(module, "weight", (module.out_channels, module.in_channels))
            _pad_tensor(module, "bias", (module.out_channels,))
        elif isinstance(module, nn.BatchNorm2d):
            module.num_features = _padded_width(module.num_features, min_channels)
            for name in ("weight", "bias", "running_mean", "running_var"):
                _pad_tensor(module, name, (module.num_features,))
    return padded


def _pad_tensor(module: nn.Module, name: str, sizes: tuple[int, ...]) -> None:
    """Pad a parameter or buffer with zeros until its first dimensions have these sizes."""
    value = getattr(module, name)
    if value is None:
        return
    padded = value.detach().new_zeros(*sizes, *value.shape[len(sizes) :])
    _crop(padded, value.shape).copy_(value.detach())
    if isinstance(value, nn.Parameter):
        module.register_parameter(name, nn.Parameter(padded, requires_grad=value.requires_grad))
    else:
        module.register_buffer(name, padded)


def _crop(value: Tensor, shape: torch.Size) -> Tensor:
    """Return the part of a tensor that lies within `shape`, as a view."""
    return value[tuple(slice(0, size) for size in shape)]
