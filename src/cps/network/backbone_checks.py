"""A first look: two images through a backbone, to refuse what could not be learned before training starts."""

import copy
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cps.network.outputs import are_close
from cps.network.partition import layer_of, move, named_tensors, set_tensors
from cps.runtime.devices import full_precision
from cps.runtime.text import first_line


class Passed(NamedTuple):
    """What a first pass shows: the number of features, and the weights that are read without calling their layer.

    No signal is seen to enter those layers, so the weights cannot be scored for pruning.
    """

    features: int
    uncalled: list[str]


@torch.no_grad()
def first_pass(backbone: nn.Module, names: Sequence[str], pixels: Tensor) -> Passed:
    """Pass some images through a backbone whose shared weights have these names.

    Raise `ValueError` if it cannot be used on such images, or if a layer is there for nothing.
    """
    ran: set[str] = set()
    shapes = {name: value.shape for name, value in named_tensors(backbone).items()}
    handles = [layer_of(backbone, name).register_forward_hook(lambda *_, name=name: ran.add(name)) for name in names]
    backbone.eval()
    try:
        with full_precision():  # held, so that no thread that trains switches it between the two
            features, again = backbone(pixels.clone()), backbone(pixels.clone())
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise ValueError(
            f"the backbone cannot process images of shape {tuple(pixels.shape[1:])}: {first_line(error)}"
            f"{_hint(backbone, pixels)}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    idle = [name for name in names if name not in ran]
    for name, value in named_tensors(backbone).items():
        if shapes.get(name) != value.shape:
            raise ValueError(f"the backbone makes '{name}' when it runs; run it once on an image before you pass it")
    if not isinstance(features, Tensor):
        raise ValueError(f"the backbone must return one tensor of features, got {type(features).__name__}")
    if features.ndim != 2 or len(features) != len(pixels):
        raise ValueError(
            f"the backbone must return features of shape (N, d), got {tuple(features.shape)} for "
            f"{len(pixels)} images; end it with a pooling and a flattening layer"
        )
    if not torch.isfinite(features).all():
        raise ValueError("the backbone returns NaN or infinite features; its weights may be damaged")
    if not torch.equal(features, again):
        raise ValueError(
            "the backbone gives the same images other features each time, in eval mode too; a dropout that stays on or "
            "a state outside its buffers would make it forget"
        )
    for name in idle:
        with full_precision():
            shaken = functional_call(backbone, {name: _shaken(named_tensors(backbone)[name])}, (pixels.clone(),))
        if torch.equal(shaken, features):
            layer = name.removesuffix("weight").removesuffix(".")
            raise ValueError(f"layer '{layer}' did not run when an image passed the backbone; remove it")
    return Passed(features.shape[1], idle)


@torch.no_grad()
def accepts_noise(backbone: nn.Module, pixels: Tensor) -> bool:
    """Say whether a backbone can look at such pixels; not if they are no places in a table that it looks them up in.

    It is asked on the CPU: where there is no such place, a GPU would fail in all that follows.
    """
    on_cpu = copy.deepcopy(backbone).eval()
    move(on_cpu, torch.device("cpu"))
    try:
        on_cpu(pixels.cpu())
    except Exception as error:  # of another kind where it needs its GPU
        return not isinstance(error, IndexError)
    return True


@torch.no_grad()
def check_references(backbone: nn.Module, pixels: Tensor) -> None:
    """Refuse a backbone that returns no features in training, or in which no other tensors can be put for a task."""
    copied = copy.deepcopy(backbone)
    with suppress(RuntimeError, ValueError):  # one image may be too few for a norm layer
        found = copied.train()(pixels.clone())
        if not isinstance(found, Tensor):
            raise TypeError(
                f"in training the backbone returns {type(found).__name__}, not one tensor of features; switch off what "
                "it returns beside them (in torchvision: aux_logits=False)"
            )
    copied.eval()
    tensors = {name: _shaken(value) for name, value in named_tensors(backbone).items()}

    def differs(names: Iterable[str]) -> bool:
        """Say whether features differ by the way in which tensors are put in."""
        changed = {name: value.clone() for name, value in named_tensors(backbone).items()}
        changed |= {name: tensors[name].clone() for name in names}
        set_tensors(copied, changed)
        with full_precision():
            swapped, written = functional_call(backbone, changed, (pixels.clone(),)), copied(pixels.clone())
        return bool(written.isfinite().all()) and not are_close(swapped, written)

    if differs(tensors):
        culprit = next((name for name in tensors if differs([name])), next(iter(tensors)))
        raise ValueError(
            f"the backbone reads '{culprit}' by another way than its attribute (a list, a partial, a cache), so tasks "
            "would share it and forget; read it as self.NAME, or keep it in an nn.ParameterList"
        )


def _shaken(value: Tensor) -> Tensor:
    """Return other values, a little larger, so that variances stay positive."""
    if not value.is_floating_point():
        return value.clone()
    draws = torch.rand(value.shape, generator=torch.Generator().manual_seed(0)).to(value)
    return value.clone().add_(draws * (0.1 * value.abs() + 0.01))


def _hint(backbone: nn.Module, pixels: Tensor) -> str:
    if any(isinstance(layer, nn.Embedding) for layer in backbone.modules()):
        return " (all inputs arrive as floating point; for an embedding, call x.long() in the forward)"
    if pixels.ndim == 4 and pixels.shape[-1] in (1, 3) and pixels.shape[1] not in (1, 3):
        return " (the images look channels-last; images.permute(0, 3, 1, 2) makes them channels-first)"
    return ""
