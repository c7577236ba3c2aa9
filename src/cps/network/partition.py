"""What of a backbone is shared between tasks, and what each task has for itself.

Shared: the weights of `Conv2d` and `Linear` layers; they are masked, pruned and taken. Private, one small
copy per task: everything else (norm layers with their statistics, biases, embeddings, other parameters).
"""

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

Module = TypeVar("Module", bound=nn.Module)

PRIVATE_SHARE = 0.25  # more private than this, of all weights, is worth a warning


@dataclass(frozen=True)
class Parts:
    """Names of a backbone's tensors: `shared` weights and the `private` rest (parameters and buffers)."""

    shared: tuple[str, ...]
    private: tuple[str, ...]

    def with_private(self, names: Collection[str]) -> "Parts":
        """Return the parts with some of the shared ones private."""
        return Parts(tuple(name for name in self.shared if name not in names), (*self.private, *names))


def partition(backbone: nn.Module) -> Parts:
    """Sort a backbone's parameters and buffers into shared and private; refuse what cannot be handled."""
    if not isinstance(backbone, nn.Module):
        hint = f"; cps.Builtin({backbone!r}) is one of ours" if isinstance(backbone, str) else ""
        raise TypeError(f"a backbone is an nn.Module, an object and not its class, got {backbone!r}{hint}")
    _refuse_what_cannot_be_masked(backbone)
    shared = tuple(f"{layer}.weight".lstrip(".") for layer in _maskable_layers(backbone))
    if not shared:
        raise ValueError("the backbone has no Conv2d or Linear layer, so there are no weights to share")
    tensors = named_tensors(backbone)
    private = tuple(name for name in tensors if name not in set(shared))
    _warn_of_large_private_parts(tensors, shared, private)
    return Parts(shared, private)


@torch.no_grad()
def put_channels_last(module: Module) -> Module:
    """Return the module, with all that has four axes, as the weights of convolutions, laid out channels last."""
    for value in named_tensors(module).values():
        if value.ndim == 4:
            value.data = in_channels_last(value.data)
    return module


def in_channels_last(value: Tensor) -> Tensor:
    """Return what has four axes, as pictures, laid out channels last, and other data as it is."""
    return value.contiguous(memory_format=torch.channels_last) if value.ndim == 4 else value


def move(module: nn.Module, device: torch.device) -> None:
    """Move a module to a device; buffers that are one tensor stay one, which torch alone would part."""
    _change_buffers(module, lambda buffer: buffer.to(device))
    module.to(device)


def copy_like(pattern: Tensor, value: Tensor) -> Tensor:
    """Return a copy of a value in the layout of another: as a model file that was read would have it."""
    return torch.empty_like(pattern).copy_(value)


def move_all(tensors: dict[str, Tensor], device: torch.device, *, channels_last: bool = False) -> None:
    """Move tensors to a device, in place of those that were there; those of four axes may be laid out channels last."""
    for name, value in tensors.items():
        layout = torch.channels_last if channels_last and value.ndim == 4 else torch.contiguous_format
        tensors[name] = value.to(device, memory_format=layout)


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that may move, by name, in the order in which optimizers count them."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers of a module by name, the live tensors themselves."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@torch.no_grad()
def set_tensors(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copy into every parameter and buffer of a module the value of that name."""
    for name, tensor in named_tensors(module).items():
        tensor.copy_(values[name])


def _maskable_layers(backbone: nn.Module) -> list[str]:
    # Attention uses the weights of its output projection without calling the layer, so no one can see
    # the signal that enters it: it stays private, as the other weights of the attention do.
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


def _refuse_what_cannot_be_masked(backbone: nn.Module) -> None:
    for name, module in backbone.named_modules():
        if isinstance(module, ScriptModule):
            raise ValueError(f"layer '{name}' is compiled TorchScript; pass the plain nn.Module")
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise ValueError(f"the backbone is wrapped in {type(module).__name__}; pass its .module")
        weight = getattr(module, "weight", None)
        computed = isinstance(module, (nn.Conv2d, nn.Linear)) and not isinstance(weight, nn.Parameter)
        computed |= any(isinstance(hook, WeightNorm | SpectralNorm) for hook in module._forward_pre_hooks.values())
        if parametrize.is_parametrized(module) or computed:
            raise ValueError(f"layer '{name}' computes its weight (a parametrization); remove that first")
    owner: dict[int, str] = {}
    for name, parameter in backbone.named_parameters(remove_duplicate=False):
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(f"'{name}' is lazy; run the backbone once on an image before you pass it")
        if not parameter.is_floating_point():
            raise ValueError(f"'{name}' has dtype {parameter.dtype}; only real floating point can be learned")
        if parameter.dtype == torch.float16:
            raise ValueError(
                f"'{name}' is in half precision, which overflows in training; pass the backbone in float32, and "
                "cps.make_fabric(precision='16-mixed') to train with halves"
            )
        if id(parameter) in owner:
            raise ValueError(f"'{owner[id(parameter)]}' and '{name}' are one tied weight; give each its own")
        owner[id(parameter)] = name


def _warn_of_large_private_parts(tensors: dict[str, Tensor], shared: tuple[str, ...], private: tuple[str, ...]) -> None:
    sizes = {name: tensors[name].numel() for name in private}
    of_all = sum(sizes.values()) + sum(tensors[name].numel() for name in shared)
    if sum(sizes.values()) > PRIVATE_SHARE * of_all:
        largest = max(sizes, key=sizes.__getitem__)
        warnings.warn(
            f"{sum(sizes.values()):,} of the backbone's {of_all:,} weights are in layers without masks (the "
            f"largest: '{largest}', {sizes[largest]:,}); every task keeps its own copy of those",
            stacklevel=4,
        )


@torch.no_grad()
def own_memory(backbone: nn.Module) -> None:
    """Give tensors plain memory of their own: expanded buffers cannot be written, and a file keeps no layouts."""
    for parameter in backbone.parameters():
        parameter.data = parameter.data.contiguous()
    _change_buffers(backbone, lambda buffer: buffer.clone(memory_format=torch.contiguous_format))


def _change_buffers(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Put something in the place of each buffer; those that are one tensor stay one."""
    changed: dict[int, Tensor] = {}
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = changed.setdefault(id(buffer), change(buffer))


def layer_of(backbone: nn.Module, weight: str) -> nn.Module:
    """Return the layer that a shared weight belongs to."""
    return backbone.get_submodule(weight.removesuffix("weight").removesuffix("."))
