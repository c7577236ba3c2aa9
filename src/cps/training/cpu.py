"""The plain training step at the speed of a CPU: memory layout, fused optimizers, and which layers gain by bfloat16."""

import math
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from cps.network.partition import as_channels_last, copy_like, named_tensors, put_channels_last

FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)  # have one operation for all parameters
SMALL_LAYER = 2**20  # multiplications below which a layer takes longer to convert its input than bfloat16 saves


def speed_up(model: nn.Module, optimizer: torch.optim.Optimizer) -> ExitStack:
    """Prepare a model and its optimizer for training on a CPU; what is returned undoes it when it is closed."""
    undo = ExitStack()
    undo.callback(_restore_layouts, [(value, value.stride()) for value in named_tensors(model).values()])
    _fuse(optimizer)
    put_channels_last(model)
    _align_state(optimizer)
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            precision = _LayerPrecision()
            undo.callback(module.register_forward_pre_hook(precision.enter).remove)
            undo.callback(module.register_forward_hook(precision.leave, always_call=True).remove)
        elif isinstance(module, nn.BatchNorm2d) or next(module.children(), None) is not None:
            undo.callback(module.register_forward_hook(_lay_out_gradient).remove)
    return undo


@torch.no_grad()
def _restore_layouts(strides: list[tuple[Tensor, tuple[int, ...]]]) -> None:
    """Give tensors the layout that they had, since a model that is read from a file computes other bits in another."""
    for value, stride in strides:
        if value.stride() != stride:
            value.data = torch.empty_strided(value.shape, stride, dtype=value.dtype).copy_(value)


def _fuse(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer of torch update all parameters in one operation, unless it was told how to."""
    for part in getattr(optimizer, "optimizers", [optimizer]):  # several that take their steps together
        for group in part.param_groups:
            if type(part) in FUSED and not any(group[key] for key in ("fused", "foreach", "differentiable")):
                group["fused"] = True


def _align_state(optimizer: torch.optim.Optimizer) -> None:
    """Give the state the layout of its parameters: a fused optimizer reads memory without regard to layouts."""
    for parameter, entries in optimizer.state.items():
        for key, value in entries.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                entries[key] = copy_like(parameter.detach(), value)


def _lay_out_gradient(_module: nn.Module, _inputs: Any, output: Any) -> None:
    """Put the gradient of an output into the channels-last layout.

    Operations such as a mean over pixels return gradients in another one, which slows down every norm layer before.
    """
    if isinstance(output, Tensor) and output.ndim == 4 and output.requires_grad and not _is_vectorised(output):
        output.register_hook(as_channels_last)


def _is_vectorised(value: Tensor) -> bool:
    """Return True inside `torch.func.vmap`, which cannot change layouts."""
    return torch._C._functorch.is_functorch_wrapped_tensor(value)  # pyright: ignore[reportAttributeAccessIssue]


class _LayerPrecision:
    """Lets a layer compute in float32 inside autocast, where bfloat16 would not be faster."""

    def __init__(self) -> None:
        self._is_float32 = False

    def enter(self, layer: Any, inputs: tuple[Any, ...]) -> Any:
        """Leave autocast before the layer runs, if it gains nothing by it."""
        if not torch.is_autocast_enabled("cpu") or len(inputs) != 1 or _gains_by_bfloat16(layer, *inputs):
            return None
        self._is_float32 = True
        torch.set_autocast_enabled("cpu", False)
        return inputs[0].to(layer.weight.dtype)

    def leave(self, _layer: nn.Module, _inputs: Any, _output: Any) -> None:
        """Enter autocast again."""
        if self._is_float32:
            torch.set_autocast_enabled("cpu", True)
            self._is_float32 = False


def _gains_by_bfloat16(layer: nn.Conv2d | nn.Linear, signal: Tensor) -> bool:
    """Return True if a training step of this layer is faster in bfloat16."""
    if isinstance(layer, nn.Linear):
        return signal.numel() * layer.out_features >= SMALL_LAYER
    positions = signal.numel() // (layer.in_channels * math.prod(layer.stride))
    is_large = positions * layer.weight.numel() >= SMALL_LAYER
    return is_large and not _has_slow_gradient(layer) and not _exceeds(layer, signal)


def _exceeds(layer: nn.Conv2d, signal: Tensor) -> bool:
    """Return True if the kernel is larger than the image.

    In bfloat16 torch leaves the gradient of weights that only ever meet padding uninitialised: it may be NaN.
    """
    extents = (step * (size - 1) + 1 for size, step in zip(layer.kernel_size, layer.dilation, strict=True))
    return any(extent > size for extent, size in zip(extents, signal.shape[2:], strict=True))


def _has_slow_gradient(layer: nn.Conv2d) -> bool:
    """Return True for convolutions whose gradients in bfloat16 take torch from twice to a hundred times as long."""
    is_depthwise = layer.groups == layer.in_channels > 1
    return is_depthwise and (max(layer.stride) > 1 or max(layer.kernel_size) > 3)
