"""A copy of a backbone that trains fast on a GPU, with the same parameter names and the same results.

Channels are padded to multiples of eight, convolutions use the fastest deterministic kernels, and batch norm layers are
fused with the addition and the ReLU after them.
"""

import copy
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cps.network.compact.channel_padding import PaddedBackbone, pad_channels
from cps.training.cuda import convolution
from cps.training.cuda.convolution import FastConv2d, use_fast_convolutions
from cps.training.cuda.flat_parameters import FlatParameters
from cps.training.cuda.fused_norms import fuse_norms

MAX_RELATIVE_ERROR = 2.0  # of the gradients of custom kernels, relative to the error of PyTorch's in bf16 ...
MAX_NOISE = 0.01  # ... plus this share of the norm of all gradients


class AcceleratedCopy(NamedTuple):
    """`module` maps images to features; `backbone` is the part of it that has the parameter names of the original."""

    module: nn.Module
    backbone: nn.Module
    has_fused_norms: bool


def accelerated_copy(
    backbone: nn.Module, pixels: Tensor, *, is_bf16: bool, has_custom_kernels: bool
) -> AcceleratedCopy:
    """Return an accelerated copy of a backbone; `pixels` are two images to check it with."""
    module: nn.Module = (
        pad_channels(backbone, pixels, min_channels=1) or pad_channels(backbone, pixels) or copy.deepcopy(backbone)
    )
    inner = module.inner if isinstance(module, PaddedBackbone) else module
    fused = fuse_norms(inner) if has_custom_kernels and is_bf16 and pixels.is_cuda else None
    inner = inner if fused is None else fused
    if has_custom_kernels:
        use_fast_convolutions(inner)
    if isinstance(module, PaddedBackbone):
        module.inner = inner
    else:
        module = inner
    return AcceleratedCopy(module, inner, fused is not None)


def check_gradients(custom: Mapping[str, Tensor], plain: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> None:
    """Raise `RuntimeError` if gradients of custom kernels are much further from the exact ones than PyTorch's in bf16.

    The limit is relative, since in a fresh network the gradients in bf16 can be off by half of their own size.
    """
    total = torch.stack([value.norm() for value in exact.values()]).norm()

    def is_close(name: str, value: Tensor) -> bool:
        limit = MAX_RELATIVE_ERROR * (plain[name] - value).norm() + MAX_NOISE * total
        return name in custom and bool((custom[name] - value).norm() <= limit)

    wrong = [name for name, value in exact.items() if not is_close(name, value)]
    if wrong or len(custom) > len(exact):
        raise RuntimeError(f"custom kernels do not agree with PyTorch's (in {', '.join(wrong[:3])})")


class Bf16Weights:
    """The weights of all fast convolutions in bf16, cast by one kernel.

    It also lets these layers write the gradients of their weights directly into the flat gradient.
    """

    def __init__(self, module: nn.Module, flat: FlatParameters):
        self._weights = flat.vector.detach()
        self._bf16 = torch.empty_like(self._weights, dtype=convolution.KERNEL_DTYPE)
        bf16, gradients = flat.views(self._bf16), flat.gradients()
        for name, layer in module.named_modules():
            weight = f"{name}.weight"
            if isinstance(layer, FastConv2d) and weight in bf16:
                layer.bf16_weight, layer.weight_gradient = bf16[weight], gradients[weight]
                flat.direct.add(weight)

    def refresh(self) -> None:
        """Cast the present weights."""
        self._bf16.copy_(self._weights)
