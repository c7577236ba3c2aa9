"""Partition a backbone into the weights that tasks share and the parameters that are private to each task.

Shared are the weights of `Conv2d` and `Linear` layers, which are masked, pruned and taken. Everything else is private:
norm layers with their statistics, biases, embeddings and other parameters. Each task has its own copy of those.
"""

import logging
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

log = logging.getLogger(__name__)

Module = TypeVar("Module", bound=nn.Module)

CHANNELS_LAST = ("cpu", "cuda")  # devices that compute convolutions faster in the channels-last layout
PRIVATE_SHARE = 0.25  # warn if a larger share of all weights is private


@dataclass(frozen=True)
class Parts:
    """Names of a backbone's tensors: `shared` weights, and all other parameters and buffers, which are `private`."""

    shared: tuple[str, ...]
    private: tuple[str, ...]

    def with_private(self, names: Collection[str]) -> "Parts":
        """Return the parts with some of the shared weights made private."""
        return Parts(tuple(name for name in self.shared if name not in names), (*self.private, *names))


def uncompiled(backbone: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` was called with, or the module itself.

    A compiled module runs the code of the tensors that it was compiled with, and cps substitutes them.
    """
    original = getattr(backbone, "_orig_mod", None)
    if not isinstance(original, nn.Module):
        return backbone
    log.info("the backbone is compiled; its original module is used, without torch.compile")
    return original


def partition(backbone: nn.Module) -> Parts:
    """Sort a backbone's parameters and buffers into shared and private ones.

    Raise an error for a backbone whose weights cannot be masked.
    """
    if not isinstance(backbone, nn.Module):
        hint = ""
        if isinstance(backbone, str):
            hint = f"; for a backbone by name pass cps.Architecture({backbone!r})"
        elif isinstance(backbone, type):
            hint = " (the class itself; pass an instance)"
        raise TypeError(f"the backbone must be an nn.Module, got {backbone!r}{hint}")
    _check_maskable(backbone)
    shared = tuple(f"{layer}.weight".lstrip(".") for layer in _maskable_layers(backbone))
    if not shared:
        hint = ""
        if any(isinstance(layer, nn.Conv1d) for layer in backbone.modules()):
            hint = "; write nn.Conv1d(a, b, k) as nn.Conv2d(a, b, (1, k)), and pass images[:, :, None]"
        raise ValueError(f"the backbone has no Conv2d or Linear layer, so there are no weights to share{hint}")
    tensors = named_tensors(backbone)
    private = tuple(name for name in tensors if name not in set(shared))
    _warn_if_mostly_private(tensors, shared, private)
    return Parts(shared, private)


@torch.no_grad()
def put_channels_last(module: Module) -> Module:
    """Convert all tensors with four axes, such as convolution weights, to channels last; return the module."""
    for value in named_tensors(module).values():
        if value.ndim == 4:
            value.data = as_channels_last(value.data)
    return module


def as_channels_last(value: Tensor) -> Tensor:
    """Return a tensor with four axes in channels-last layout, any other unchanged."""
    if value.ndim != 4:
        return value
    value = value.contiguous(memory_format=torch.channels_last)
    if value.device.type == "cpu" and value.shape[1] == 1:  # both layouts, and a CPU takes it for the other one
        height, width = value.shape[2:]
        return value.as_strided(value.shape, (height * width, 1, width, 1))
    return value


def move_module(module: nn.Module, device: torch.device) -> None:
    """Move a module to a device. Unlike `module.to`, buffers that are the same tensor stay the same tensor."""
    _replace_buffers(module, lambda buffer: buffer.to(device))
    module.to(device)


def copy_like(pattern: Tensor, value: Tensor) -> Tensor:
    """Return a copy of `value` in the memory layout of `pattern`: the layout it has when read from a model file."""
    return torch.empty_like(pattern).copy_(value)


def move_tensors(tensors: dict[str, Tensor], device: torch.device, *, channels_last: bool = False) -> None:
    """Replace the tensors of a dict by copies on a device, those with four axes in channels-last layout if asked."""
    for name, value in tensors.items():
        layout = torch.channels_last if channels_last and value.ndim == 4 else torch.contiguous_format
        tensors[name] = value.to(device, memory_format=layout)


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require gradients, by name, in the order that optimizers number them."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers of a module by name: the live tensors, not copies."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@torch.no_grad()
def set_tensors(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copy the value of the same name into every parameter and buffer of a module."""
    for name, tensor in named_tensors(module).items():
        tensor.copy_(values[name])


def _maskable_layers(backbone: nn.Module) -> list[str]:
    # Attention uses the weights of its output projection without calling the layer, so hooks cannot record the input of
    # that layer. It stays private, like the other weights of attention.
    inside_attention = {
        child
        for module in backbone.modules()
        if isinstance(module, nn.MultiheadAttention)
        for child in module.modules()
    }
    return [
        name
        for name, module in backbone.named_modules()
        if isinstance(module, (nn.Conv2d, nn.Linear)) and module not in inside_attention
    ]


def _check_maskable(backbone: nn.Module) -> None:
    """Raise `ValueError` for modules and parameters that cannot be masked."""
    for name, module in backbone.named_modules():
        if isinstance(module, ScriptModule):
            raise ValueError(f"layer '{name}' is TorchScript; pass the original nn.Module")
        if isinstance(getattr(module, "_orig_mod", None), nn.Module):
            raise ValueError(f"layer '{name}' is compiled by torch.compile; pass the backbone with its original layers")
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise ValueError(f"the backbone is wrapped in {type(module).__name__}; pass its .module")
        weight = getattr(module, "weight", None)
        is_computed = isinstance(module, (nn.Conv2d, nn.Linear)) and not isinstance(weight, nn.Parameter)
        is_computed |= any(isinstance(hook, WeightNorm | SpectralNorm) for hook in module._forward_pre_hooks.values())
        if parametrize.is_parametrized(module) or is_computed:
            raise ValueError(f"layer '{name}' computes its weight (a parametrization); remove the parametrization")
    owner: dict[int, str] = {}
    for name, parameter in backbone.named_parameters(remove_duplicate=False):
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(f"'{name}' is not initialised (a lazy layer); run the backbone once on an image first")
        if not parameter.is_floating_point():
            raise ValueError(f"'{name}' has dtype {parameter.dtype}; parameters must be real floating point")
        if parameter.dtype == torch.float16:
            raise ValueError(
                f"'{name}' is in half precision, which overflows in training; pass the backbone in float32, and "
                "fabric=cps.make_fabric(precision='16-mixed') to train in mixed precision"
            )
        if id(parameter) in owner:
            raise ValueError(f"'{owner[id(parameter)]}' and '{name}' are one tied weight; give each layer its own")
        owner[id(parameter)] = name


def _warn_if_mostly_private(tensors: dict[str, Tensor], shared: tuple[str, ...], private: tuple[str, ...]) -> None:
    """Warn if each task would need its own copy of a large share of the weights."""
    sizes = {name: tensors[name].numel() for name in private}
    total = sum(sizes.values()) + sum(tensors[name].numel() for name in shared)
    if sum(sizes.values()) > PRIVATE_SHARE * total:
        largest = max(sizes, key=sizes.__getitem__)
        warnings.warn(
            f"{sum(sizes.values()):,} of the backbone's {total:,} weights are in layers without masks (the "
            f"largest: '{largest}', {sizes[largest]:,}); every task keeps its own copy of those",
            stacklevel=4,
        )


@torch.no_grad()
def make_contiguous(backbone: nn.Module) -> None:
    """Give every tensor its own contiguous memory: expanded buffers cannot be written, and files keep no layouts."""
    for parameter in backbone.parameters():
        parameter.data = parameter.data.contiguous()
    _replace_buffers(backbone, lambda buffer: buffer.clone(memory_format=torch.contiguous_format))


def _replace_buffers(module: nn.Module, convert: Callable[[Tensor], Tensor]) -> None:
    """Replace each buffer by its converted copy; buffers that are the same tensor stay the same tensor."""
    converted: dict[int, Tensor] = {}
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = converted.setdefault(id(buffer), convert(buffer))


def layer_of(backbone: nn.Module, weight: str) -> nn.Module:
    """Return the layer that a shared weight belongs to."""
    return backbone.get_submodule(weight.removesuffix("weight").removesuffix("."))
