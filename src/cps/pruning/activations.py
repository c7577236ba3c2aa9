"""Record the activations that pruning measures: inputs of layers, and the summands of residual connections.

`record_activations` needs one forward pass over the images. It works on any module without rewriting its forward. The
input of a layer is what its convolution or matrix product receives, which a `forward` of its own may have padded.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from cps.network.partition import layer_of
from cps.runtime.layer_calls import LayerCall, record_layer_calls

ADDITIONS = {"add", "__add__", "__radd__", "__iadd__", "add_"}
PASS_THROUGH = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.Identity, nn.Dropout, nn.Dropout2d)


@dataclass
class LayerOutput:
    """The output of a shared layer, after any norm layers, and the number of operations that read it."""

    weight: str
    channel_axis: int
    before: "LayerOutput | None" = None
    reads: int = 0

    def is_read_once(self) -> bool:
        """Return True if nothing else reads the signal between the layer and here."""
        return self.reads == 1 and (self.before is None or self.before.is_read_once())


@dataclass
class Addition:
    """One addition in the forward pass: the sum over images of each summand's absolute value."""

    branches: tuple[LayerOutput | None, LayerOutput | None]
    sums: tuple[Tensor, Tensor]
    images: int


@dataclass
class Activations:
    """Activations over all images.

    `calls[name]` has an entry for each call of that layer, whose `input` is the mean absolute one: (channels, height,
    width) for `Conv2d` and (features,) for `Linear`, where all axes but the last are averaged. `additions` holds sums,
    since only their ratios matter. Its keys are the two layers that are added and how often they were added before.
    """

    calls: dict[str, list[LayerCall]] = field(default_factory=dict)
    additions: dict[tuple[str | None, str | None, int], Addition] = field(default_factory=dict)


@torch.no_grad()
def record_activations(backbone: nn.Module, names: Sequence[str], batches: Iterable[Tensor]) -> Activations:
    """Run batches of pixels through the backbone in eval mode and return the activations."""
    activations = Activations()
    layers = {name: layer_of(backbone, name) for name in names}
    inputs = _InputSums(names)
    images = 0
    backbone.eval()
    for pixels in batches:
        recorder = _AdditionRecorder()
        inputs.begin_batch()
        with _mark_branches(backbone, layers), recorder, record_layer_calls(layers, inputs.add):
            backbone(pixels.clone())  # a copy, since the first operation may work in place
        _accumulate(activations, recorder.additions, len(pixels))
        images += len(pixels)
    activations.calls = inputs.means()
    activations.additions = {key: known for key, known in activations.additions.items() if known.images == images}
    return activations


class _InputSums:
    """The sums of the absolute inputs of each call of each layer over images, and over tokens for `Linear`."""

    def __init__(self, names: Sequence[str]):
        self._sums: dict[str, list[tuple[LayerCall, int]]] = {name: [] for name in names}  # with numbers of rows
        self.begin_batch()

    def begin_batch(self) -> None:
        """Count the calls of each layer from the first one again."""
        self._done = dict.fromkeys(self._sums, 0)

    def add(self, name: str, call: LayerCall) -> None:
        """Add the input of the next call of a layer."""
        magnitude = call.input.detach().abs().float()
        axes = 1 if call.convolution is None else 3  # of one input
        rows = magnitude.reshape(-1, *magnitude.shape[-axes:])
        total, number = _sum_over_images(rows), len(rows)
        index, sums = self._done[name], self._sums[name]
        self._done[name] += 1
        if index == len(sums):
            sums.append((replace(call, input=total), number))
        else:
            known, before = sums[index]
            sums[index] = replace(known, input=known.input + total), before + number

    def means(self) -> dict[str, list[LayerCall]]:
        """Return each call of each layer with its mean absolute input."""
        return {
            name: [replace(call, input=call.input / number) for call, number in sums]
            for name, sums in self._sums.items()
        }


def _sum_over_images(values: Tensor) -> Tensor:
    """Return the sum over the first axis. A CPU takes a fifth of the time if it reads the memory in its order."""
    is_channels_last = values.ndim == 4 and values.is_contiguous(memory_format=torch.channels_last)
    if values.device.type != "cpu" or not is_channels_last:
        return values.sum(dim=0)
    _, channels, height, width = values.shape
    total = values.permute(0, 2, 3, 1).flatten(1).sum(dim=0)
    return total.view(height, width, channels).permute(2, 0, 1).contiguous()


class _AdditionRecorder(TorchFunctionMode):
    """Intercepts every torch operation of a forward pass: records additions, and counts the readers of branches."""

    def __init__(self) -> None:
        super().__init__()
        self.additions: list[Addition] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_addition = getattr(func, "__name__", "") in ADDITIONS
        if is_addition:
            self._record(args)
        result = func(*args, **(kwargs or {}))
        if isinstance(result, (Tensor, tuple, list)) and not isinstance(result, torch.Size):
            for argument in tree_leaves((args, kwargs)):
                self._count_read(argument, is_addition=is_addition, in_place=result is argument)
        return result

    def _count_read(self, argument: Any, *, is_addition: bool, in_place: bool) -> None:
        branch = getattr(argument, "_cps_source", None) if isinstance(argument, Tensor) else None
        if branch is None or (in_place and not is_addition):  # an activation in place: still the same signal
            return
        branch.reads += 1
        if in_place:  # the tensor holds the sum from now on
            del argument._cps_source  # pyright: ignore

    def _record(self, summands: Sequence[Any]) -> None:
        if len(summands) < 2 or not all(isinstance(summand, Tensor) for summand in summands[:2]):
            return
        first, second = summands[0], summands[1]
        branches = (getattr(first, "_cps_source", None), getattr(second, "_cps_source", None))
        if branches != (None, None) and first.shape == second.shape:
            sums = (_sum_over_images(first.abs()), _sum_over_images(second.abs()))
            self.additions.append(Addition(branches, sums, len(first)))


@contextmanager
def _mark_branches(backbone: nn.Module, layers: Mapping[str, nn.Module]) -> Iterator[None]:
    """Mark the outputs of layers, and of norm layers after them, as branches."""
    handles = []

    def mark(name: str, layer: nn.Module) -> None:
        def after(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            output._cps_source = LayerOutput(name, output_channel_axis(layer))  # pyright: ignore

        handles.append(layer.register_forward_hook(after))

    def pass_on(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        source = getattr(inputs[0], "_cps_source", None)
        if source is not None and output is not inputs[0]:
            output._cps_source = LayerOutput(source.weight, source.channel_axis, source)  # pyright: ignore

    for name, layer in layers.items():
        mark(name, layer)
    for module in backbone.modules():
        if isinstance(module, PASS_THROUGH):
            handles.append(module.register_forward_hook(pass_on))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def output_channel_axis(layer: nn.Module) -> int:
    """Return the channel axis of a layer's output."""
    return 1 if isinstance(layer, nn.Conv2d) else -1


def _accumulate(activations: Activations, additions: list[Addition], images: int) -> None:
    """Add the additions of one batch to those of earlier batches."""
    counts: dict[tuple[str | None, str | None], int] = {}
    for addition in additions:
        first, second = (branch.weight if branch else None for branch in addition.branches)
        key = first, second, counts.setdefault((first, second), 0)
        counts[first, second] += 1
        known = activations.additions.get(key)
        if known is None:
            activations.additions[key] = addition
        elif all(a.shape == b.shape for a, b in zip(known.sums, addition.sums, strict=True)):
            known.images += images
            for total, more in zip(known.sums, addition.sums, strict=True):
                total += more
