"""Check a backbone by running a few images, so that one that cannot be used is rejected before training starts."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cps.data.images import AS_RGB
from cps.network.masks import mask_shape
from cps.network.outputs import are_close
from cps.network.partition import layer_of, move_module, named_tensors, set_tensors
from cps.runtime.devices import full_precision
from cps.runtime.layer_calls import record_layer_calls
from cps.runtime.text import first_line


class ForwardCheck(NamedTuple):
    """The number of features, and the names of weights of unusual layers.

    `unscored` weights are passed neither to `F.conv2d` nor to `F.linear` by calls of their layer. What they are
    multiplied with is unknown, so they cannot be scored for pruning. Layers of `computed` weights pass another tensor.
    """

    features: int
    unscored: list[str]
    computed: list[str]


@torch.no_grad()
def check_forward(backbone: nn.Module, names: Sequence[str], pixels: Tensor) -> ForwardCheck:
    """Run a batch of images through a backbone whose shared weights have these names.

    Raise `ValueError` if the backbone cannot be used on such images, or has a layer that does not affect the features.
    """
    passed: dict[str, Tensor] = {}  # the weight that each layer uses
    layers = {name: layer_of(backbone, name) for name in names}
    shapes = {name: value.shape for name, value in named_tensors(backbone).items()}
    backbone.eval()
    try:
        with full_precision():  # held for both, so that a training thread cannot switch it in between
            features, again = backbone(pixels.clone()), backbone(pixels.clone())
            with record_layer_calls(layers, lambda name, call: passed.update({name: call.weight})):
                backbone(pixels.clone())  # a third pass: recording may make a module choose another implementation
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError) as error:  # timm asserts sizes
        raise ValueError(
            f"the backbone cannot process images of shape {tuple(pixels.shape[1:])}: {first_line(error)}"
            f"{_hint(backbone, pixels)}"
        ) from error
    unscored = [name for name in names if name not in passed]
    for name, value in named_tensors(backbone).items():
        if shapes.get(name) != value.shape:
            raise ValueError(f"the backbone creates '{name}' in its first forward pass; run it once on an image first")
    if not isinstance(features, Tensor):
        hint = _output_hint(features)
        raise ValueError(f"the backbone must return one tensor of features, got {type(features).__name__}{hint}")
    if features.ndim != 2 or len(features) != len(pixels):
        raise ValueError(
            f"the backbone must return features of shape (N, d), got {tuple(features.shape)} for "
            f"{len(pixels)} images; end it with a pooling and a flattening layer"
        )
    if not torch.isfinite(features).all():
        raise ValueError("the backbone returns NaN or infinite features; its weights may be damaged")
    if not torch.equal(features, again):
        raise ValueError(
            "the backbone returns different features for the same images, even in eval mode; a dropout that stays on, "
            "or state outside its buffers, would make it forget"
        )
    for name in unscored:
        with full_precision():
            changed = functional_call(backbone, {name: _perturb(named_tensors(backbone)[name])}, (pixels.clone(),))
        if torch.equal(changed, features):
            layer = name.removesuffix("weight").removesuffix(".")
            raise ValueError(f"layer '{layer}' does not run in the forward pass; remove it")
    computed = [name for name, weight in passed.items() if weight is not layers[name].weight]
    return ForwardCheck(features.shape[1], unscored, computed)


@torch.no_grad()
def check_masks_hold(backbone: nn.Module, names: Sequence[str], pixels: Tensor) -> None:
    """Raise `ValueError` if a layer that computes its weight uses connections that a mask has switched off.

    Weight standardisation does: it subtracts the mean of all values, which is not zero, from those that are.
    """
    if not names:
        return
    draws = torch.Generator().manual_seed(0)
    tensors = named_tensors(backbone)
    off = {name: torch.rand(mask_shape(tensors[name].shape), generator=draws) < 0.5 for name in names}
    off = {name: mask.to(tensors[name].device) for name, mask in off.items()}
    used: dict[str, Tensor] = {}
    layers = {name: layer_of(backbone, name) for name in names}
    with record_layer_calls(layers, lambda name, call: used.update({name: call.weight})):
        functional_call(backbone, {name: tensors[name].masked_fill(off[name], 0) for name in names}, (pixels.clone(),))
    for name, mask in off.items():
        if used[name].masked_select(mask).any():
            layer = name.removesuffix(".weight")
            raise ValueError(
                f"layer '{layer}' ({type(layers[name]).__name__}) computes its weight from all values of it, as weight "
                "standardisation does, so pruned connections would stay partly on; use a plain Conv2d or Linear there"
            )


@torch.no_grad()
def accepts_noise(backbone: nn.Module, pixels: Tensor) -> bool:
    """Return False if the backbone uses its input as indices, for instance of an embedding, and noise is out of range.

    This runs on the CPU: an index out of range on a GPU would make all later calls fail.
    """
    on_cpu = copy.deepcopy(backbone).eval()
    move_module(on_cpu, torch.device("cpu"))
    try:
        on_cpu(pixels.cpu())
    except Exception as error:  # another error may mean that the backbone needs its GPU
        return not isinstance(error, IndexError)
    return True


@torch.no_grad()
def check_functional_call(backbone: nn.Module, pixels: Tensor) -> None:
    """Raise an error for a backbone that does not return features in training, or ignores substituted tensors.

    `torch.func.functional_call` replaces the attributes of a module. A tensor that the backbone reads in another way
    would stay the same for all tasks.
    """
    copied = copy.deepcopy(backbone)
    with suppress(RuntimeError, ValueError):  # one image may be too few for a norm layer
        features = copied.train()(pixels.clone())
        if not isinstance(features, Tensor):
            raise TypeError(
                f"in training mode the backbone must return one tensor of features, got {type(features).__name__}; "
                "switch off its other outputs (in torchvision: aux_logits=False)"
            )
    copied.eval()
    tensors = {name: _perturb(value) for name, value in named_tensors(backbone).items()}

    def differs(names: Iterable[str]) -> bool:
        """Return True if substituting tensors by `functional_call` and copying them into the module differ."""
        changed = {name: value.clone() for name, value in named_tensors(backbone).items()}
        changed |= {name: tensors[name].clone() for name in names}
        set_tensors(copied, changed)
        with full_precision():
            substituted, written = functional_call(backbone, changed, (pixels.clone(),)), copied(pixels.clone())
        return bool(written.isfinite().all()) and not are_close(substituted, written)

    if differs(tensors):
        culprit = next((name for name in tensors if differs([name])), next(iter(tensors)))
        raise ValueError(
            f"the backbone does not read '{culprit}' from its attribute (but from a list, a partial or a cache), so "
            "tasks would share it and forget; read it as self.NAME, or keep it in an nn.ParameterList"
        )


def _perturb(value: Tensor) -> Tensor:
    """Return slightly larger values: larger, so that variances stay positive."""
    if not value.is_floating_point():
        return value.clone()
    noise = torch.rand(value.shape, generator=torch.Generator().manual_seed(0)).to(value)
    return value.clone().add_(noise * (0.1 * value.abs() + 0.01))


def _hint(backbone: nn.Module, pixels: Tensor) -> str:
    """Return a hint at the likely reason why the backbone cannot process the pixels."""
    if any(isinstance(layer, nn.Embedding) for layer in backbone.modules()):
        return " (inputs are floating point; for an embedding, call x.long() in forward)"
    if pixels.ndim == 4 and pixels.shape[-1] in (1, 3) and pixels.shape[1] not in (1, 3):
        return " (the images seem to be channels-last; convert them with images.permute(0, 3, 1, 2))"
    first = next((layer for layer in backbone.modules() if isinstance(layer, nn.Conv2d)), None)
    if first is not None and first.in_channels == 3 and pixels.ndim == 4 and pixels.shape[1] in (1, 4):
        return f" (make pictures RGB with {AS_RGB})"
    return ""


def _output_hint(output: object) -> str:
    """Return how to wrap a backbone that returns several outputs, such as those of Hugging Face."""
    if isinstance(output, Mapping):
        names = [str(name) for name, value in output.items() if isinstance(value, Tensor) and value.ndim == 2]
        part = f".{names[0]}" if names else ".last_hidden_state.mean(1)"
    elif isinstance(output, tuple | list):
        part = "[0]"
    else:
        return ""
    return f"; wrap it in a module whose forward returns self.backbone(images){part}"
