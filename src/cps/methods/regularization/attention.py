"""Attention maps: where in an image the score of a class comes from (Grad-CAM, Selvaraju et al., ICCV 2017)."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@torch.no_grad()
def last_maps(backbone: nn.Module, pixels: Tensor) -> str:
    """Return the name of the module with the last feature maps (N, channels, height, width) of more than one pixel.

    They are those that are pooled to features. Raise `ValueError` if there are none.
    """
    found: list[str] = []

    def record(name: str, module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor) and output.ndim == 4 and output[0, 0].numel() > 1:
            found.append(name)

    modules = [(name, module) for name, module in backbone.named_modules() if name]
    handles = [module.register_forward_hook(partial(record, name)) for name, module in modules]
    try:
        backbone(pixels)
    finally:
        for handle in handles:
            handle.remove()
    if not found:
        raise ValueError("attention maps need a backbone with convolutions, whose maps have more than one pixel")
    return found[-1]


@contextmanager
def recorded_maps(backbone: nn.Module, name: str, *, detached: bool = False) -> Iterator[list[Tensor]]:
    """Record the output of a module of a backbone in a list, while it runs.

    If `detached`, the rest of the network continues from a copy that requires gradients, so that a network which is not
    trained has gradients, too.
    """
    maps: list[Tensor] = []

    def hook(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        maps.append(output.detach().requires_grad_() if detached else output)
        return maps[-1]

    handle = backbone.get_submodule(name).register_forward_hook(hook)
    try:
        yield maps
    finally:
        handle.remove()


def attention_maps(scores: Tensor, maps: Tensor, *, create_graph: bool = False) -> Tensor:
    """Return an attention map (N, pixels) of unit length for one score (N,) of each image.

    It is relu(sum_k a_k A_k), where A_k are the maps (N, channels, height, width), and a_k is the mean over the pixels
    of the gradient of the score. With `create_graph`, a_k can be differentiated, too.
    """
    (gradients,) = torch.autograd.grad(scores.sum(), maps, create_graph=create_graph, retain_graph=True)
    weights = gradients.mean(dim=(2, 3), keepdim=True)  # (N, channels, 1, 1)
    return F.normalize((weights * maps).sum(dim=1).relu().flatten(1), dim=1, eps=1e-6)


def attention_distance(first: Tensor, second: Tensor) -> Tensor:
    """Return the sum over pixels of the absolute differences of two attention maps, averaged over images."""
    return (first - second).abs().sum(dim=1).mean()
