"""The twin: a copy of a backbone that a GPU trains fast, with the same names and the same results.

Widths are padded to multiples of eight, convolutions use the fastest kernels that always give the same bits, and norm
layers do what follows them.
"""

import copy
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cps.network.compact.channel_padding import Padded, padded
from cps.training.cuda import convolution
from cps.training.cuda.convolution import Convolution, quicken
from cps.training.cuda.flat_parameters import FlatParameters
from cps.training.cuda.fused_norms import joined

WORSE, NOISE = 2.0, 0.01  # how far off our gradients may be: times PyTorch's own error, and of all gradients together


class AcceleratedCopy(NamedTuple):
    """A module from images to features, the part of it that has the backbone's names, and whether norms are joined."""

    whole: nn.Module
    inner: nn.Module
    is_joined: bool


def accelerated_copy(backbone: nn.Module, pixels: Tensor, *, is_bf16: bool, is_quick: bool) -> AcceleratedCopy:
    """Return the twin of a backbone; `is_bf16`: for bf16; `is_quick`: with kernels of our own."""
    whole: nn.Module = padded(backbone, pixels, least=1) or padded(backbone, pixels) or copy.deepcopy(backbone)
    inner = whole.inner if isinstance(whole, Padded) else whole
    found = joined(inner) if is_quick and is_bf16 and pixels.is_cuda else None
    inner = inner if found is None else found
    if is_quick:
        quicken(inner)
    if isinstance(whole, Padded):
        whole.inner = inner
    else:
        whole = inner
    return AcceleratedCopy(whole, inner, found is not None)


def check_alike(ours: Mapping[str, Tensor], plain: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> None:
    """Refuse gradients by kernels of our own that are much further from the exact ones than PyTorch's in bf16.

    In a fresh network those are off by up to half of themselves, so nothing is said about how far off is too far.
    """
    total = torch.stack([value.norm() for value in exact.values()]).norm()
    apart = [
        name
        for name, value in exact.items()
        if name not in ours or not (ours[name] - value).norm() <= WORSE * (plain[name] - value).norm() + NOISE * total
    ]
    if apart or len(ours) > len(exact):
        raise RuntimeError(f"our own kernels do not agree with PyTorch's (in {', '.join(apart[:3])})")


class Bf16Weights:
    """The weights of a module's quick convolutions in bf16, cast all at once; their gradients go where they belong."""

    def __init__(self, module: nn.Module, flat: FlatParameters):
        self._wide = flat.vector.detach()
        self._bf16 = torch.empty_like(self._wide, dtype=convolution.KERNEL_TYPE)
        bf16, places = flat.views(self._bf16), flat.gradients()
        for name, layer in module.named_modules():
            weight = f"{name}.weight"
            if isinstance(layer, Convolution) and weight in bf16:
                layer.bf16, layer.place = bf16[weight], places[weight]
                flat.written.add(weight)

    def refresh(self) -> None:
        """Cast the weights as they are now."""
        self._bf16.copy_(self._wide)
