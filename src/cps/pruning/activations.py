"""Record the activations that pruning measures: inputs of layers, and the summands of residual connections.

`record_activations` needs one forward pass over the images. It works on any module without rewriting its forward.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from cps.network.partition import layer_of

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

    `inputs[name]` has an entry for each call of that layer: its mean absolute input, (channels, height, width) for
    `Conv2d` and (features,) for `Linear`, where all axes but the last are averaged. `additions` holds sums, since only
    their ratios matter. Its keys are the two layers that are added and how often they were added before.
    """

    inputs: dict[str, list[Tensor]] = field(default_factory=dict)
    additions: dict[tuple[str | None, str | None, int], Addition] = field(default_factory=dict)


@torch.no_grad()
def record_activations(backbone: nn.Module, names: Sequence[str], batches: Iterable[Tensor]) -> Activations:
    """Run batches of pixels through the backbone in eval mode and return the activations."""
    activations = Activations()
    rows: dict[str, list[int]] = {}
    images = 0
    backbone.eval()
    for pixels in batches:
        calls: dict[str, list[tuple[Tensor, int]]] = {name: [] for name in names}
        recorder = _AdditionRecorder()
        with _hooks(backbone, names, calls), recorder:
            backbone(pixels.clone())  # a copy, since the first operation may work in place
        for name, sums in calls.items():
            totals = activations.inputs.setdefault(name, [torch.zeros_like(total) for total, _ in sums])
            counts = rows.setdefault(name, [0] * len(sums))
            for index, (total, number) in enumerate(sums):
                totals[index] += total
                counts[index] += number
        _accumulate(activations, recorder.additions, len(pixels))
        images += len(pixels)
    for name, totals in activations.inputs.items():
        activations.inputs[name] = [total / number for total, number in zip(totals, rows[name], strict=True)]
    activations.additions = {key: known for key, known in activations.additions.items() if known.images == images}
    return activations


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
            sums = (first.abs().sum(dim=0), second.abs().sum(dim=0))
            self.additions.append(Addition(branches, sums, len(first)))


@contextmanager
def _hooks(backbone: nn.Module, names: Sequence[str], calls: dict[str, list[tuple[Tensor, int]]]) -> Iterator[None]:
    """Record the inputs of the named layers in `calls`, and mark their outputs as branches."""
    handles = []

    def hook_layer(name: str, layer: nn.Module) -> None:
        def before(_module: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
            calls[name].append(_sum_input(layer, inputs[0] if inputs else named["input"]))

        def after(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            output._cps_source = LayerOutput(name, output_channel_axis(layer))  # pyright: ignore

        handles.append(layer.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(layer.register_forward_hook(after))

    def pass_on(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        source = getattr(inputs[0], "_cps_source", None)
        if source is not None and output is not inputs[0]:
            output._cps_source = LayerOutput(source.weight, source.channel_axis, source)  # pyright: ignore

    for name in names:
        hook_layer(name, layer_of(backbone, name))
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


def _sum_input(layer: nn.Module, signal: Tensor) -> tuple[Tensor, int]:
    """Return the sum of the absolute input over images (and tokens, for `Linear`), and their number."""
    magnitude = signal.detach().abs().float()
    rows = magnitude if isinstance(layer, nn.Conv2d) else magnitude.reshape(-1, magnitude.shape[-1])
    return rows.sum(dim=0), len(rows)


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
