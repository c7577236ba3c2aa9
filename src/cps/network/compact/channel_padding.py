"""Padding: a twin of a backbone whose widths are multiples of eight, which GPUs are fast at.

The channels added are zero and stay zero: nothing reads them, so no gradient reaches them, and what reads them
receives nothing. The twin computes what the backbone does, which is checked on two images before it is used.
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cps.network.partition import named_tensors, trainable
from cps.runtime.devices import full_precision

MULTIPLE = 8


class Padded(nn.Module):
    """A widened copy of a backbone that returns the backbone's features."""

    def __init__(self, backbone: nn.Module, features: int, least: int):
        super().__init__()
        self.inner = widened(backbone, least)
        self.features, self.least = features, least

    def forward(self, pixels: Tensor) -> Tensor:
        """Return features, shape (N, d)."""
        missing = wide(pixels.shape[1], self.least) - pixels.shape[1]
        wider = F.pad(pixels, (0, 0, 0, 0, 0, missing)) if missing else pixels
        return self.inner(wider)[:, : self.features]


def widened(backbone: nn.Module, least: int) -> nn.Module:
    """Return a copy with every convolution and batch norm layer padded with zeros to a multiple of eight."""
    twin = copy.deepcopy(backbone)
    for module in twin.modules():
        if isinstance(module, nn.Conv2d):
            module.in_channels, module.out_channels = wide(module.in_channels, least), wide(module.out_channels, least)
            _pad(module, "weight", (module.out_channels, module.in_channels))
            _pad(module, "bias", (module.out_channels,))
        elif isinstance(module, nn.BatchNorm2d):
            module.num_features = wide(module.num_features, least)
            for name in ("weight", "bias", "running_mean", "running_var"):
                _pad(module, name, (module.num_features,))
    return twin


def pads(backbone: nn.Module, least: int) -> bool:
    """Say whether the backbone has awkward widths, and only layers that can be padded."""
    layers = [module for module in backbone.modules() if next(module.parameters(recurse=False), None) is not None]
    paddable = all(
        isinstance(layer, nn.BatchNorm2d) or (isinstance(layer, nn.Conv2d) and layer.groups == 1) for layer in layers
    )
    widths = [layer.out_channels for layer in layers if isinstance(layer, nn.Conv2d)]
    return paddable and any(width != wide(width, least) for width in widths)


@torch.no_grad()
def padded(backbone: nn.Module, pixels: Tensor, *, least: int = 2 * MULTIPLE) -> Padded | None:
    """Return the padded twin of a backbone, or None where it has none or would compute something else.

    Fewer than `least` channels are not padded; with 1, those of the images are.
    """
    if not pads(backbone, least):
        return None
    was_training = backbone.training
    with full_precision():
        expected = backbone.eval()(pixels)
        backbone.train(was_training)
        try:
            twin = Padded(backbone, expected.shape[1], least).to(pixels.device)
            agrees = torch.allclose(twin.eval()(pixels), expected, rtol=1e-3, atol=1e-4)
        except RuntimeError:
            return None
    return twin if agrees else None


@torch.no_grad()
def copy_into(source: nn.Module, target: nn.Module) -> None:
    """Copy every tensor of one module into the other, as far as both reach; what is beyond stays."""
    values, into = named_tensors(source), named_tensors(target)
    torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
        [overlap(into[name].detach(), value.shape) for name, value in values.items()],
        [overlap(value.detach(), into[name].shape) for name, value in values.items()],
    )


def overlap(value: Tensor, shape: torch.Size) -> Tensor:
    """Return the view of a tensor that lies within a shape."""
    return value[tuple(slice(0, size) for size in shape)]


def resized_state(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return an optimizer's state with every tensor cut, or padded with zeros, to what its parameter is like."""
    parameters = list(trainable(model).values())

    def fitted(value: Any, parameter: Tensor) -> Any:
        if not isinstance(value, Tensor) or value.ndim != parameter.ndim:
            return value
        wide = torch.zeros_like(parameter, dtype=value.dtype, requires_grad=False)
        overlap(wide, value.shape).copy_(overlap(value, parameter.shape))
        return wide

    fitting = {
        index: {key: fitted(value, parameters[index]) for key, value in entries.items()}
        for index, entries in state["state"].items()
    }
    return {**state, "state": fitting}


def wide(channels: int, least: int) -> int:
    """Return the padded number of channels."""
    return channels if channels < least else -(-channels // MULTIPLE) * MULTIPLE


def _pad(module: nn.Module, name: str, sizes: tuple[int, ...]) -> None:
    value = getattr(module, name)
    if value is None:
        return
    wide = value.detach().new_zeros(*sizes, *value.shape[len(sizes) :])
    overlap(wide, value.shape).copy_(value.detach())
    if isinstance(value, nn.Parameter):
        module.register_parameter(name, nn.Parameter(wide, requires_grad=value.requires_grad))
    else:
        module.register_buffer(name, wide)
