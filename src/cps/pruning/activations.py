"""What flows through a network: the signals that pruning looks at.

`activity_of` needs one forward pass over the images. It sees the inputs of every shared layer and every
addition of two signals (a residual connection), in any module, without rewriting its forward.
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
class Branch:
    """The output of a shared layer on its way through norm layers, and how many operations read it."""

    weight: str
    channel_axis: int
    before: "Branch | None" = None
    reads: int = 0

    def is_read_once(self) -> bool:
        """Say whether all of the signal goes one way, from the layer to where it is now."""
        return self.reads == 1 and (self.before is None or self.before.is_read_once())


@dataclass
class Addition:
    """One addition seen in the forward pass: the sum over images of each summand's absolute value."""

    branches: tuple[Branch | None, Branch | None]
    sums: tuple[Tensor, Tensor]
    images: int


@dataclass
class Activity:
    """Signals over all images.

    `inputs[name]` lists, for each call of that layer, the mean absolute input: (channels, height, width)
    for `Conv2d`, (features,) for `Linear`, where every axis but the last is averaged over. `additions` hold
    sums, since only their ratios matter, by the layers that meet and how often they have met before.
    """

    inputs: dict[str, list[Tensor]] = field(default_factory=dict)
    additions: dict[tuple[str | None, str | None, int], Addition] = field(default_factory=dict)


@torch.no_grad()
def activity_of(backbone: nn.Module, names: Sequence[str], batches: Iterable[Tensor]) -> Activity:
    """Pass batches of pixels through the backbone in eval mode and return the signals."""
    activity = Activity()
    rows: dict[str, list[int]] = {}
    images = 0
    backbone.eval()
    for pixels in batches:
        calls: dict[str, list[tuple[Tensor, int]]] = {name: [] for name in names}
        watch = _AdditionWatch()
        with _hooks(backbone, names, calls), watch:
            backbone(pixels.clone())  # its first operation may work in place
        for name, sums in calls.items():
            known = activity.inputs.setdefault(name, [torch.zeros_like(total) for total, _ in sums])
            counts = rows.setdefault(name, [0] * len(sums))
            for index, (total, number) in enumerate(sums):
                known[index] += total
                counts[index] += number
        _add_up(activity, watch.additions, len(pixels))
        images += len(pixels)
    for name, totals in activity.inputs.items():
        activity.inputs[name] = [total / number for total, number in zip(totals, rows[name], strict=True)]
    activity.additions = {key: seen for key, seen in activity.additions.items() if seen.images == images}
    return activity


class _AdditionWatch(TorchFunctionMode):
    """Sees every torch operation of a forward pass: notes additions, counts who reads a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.additions: list[Addition] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        adds = getattr(func, "__name__", "") in ADDITIONS
        if adds:
            self._note(args)
        result = func(*args, **(kwargs or {}))
        if isinstance(result, (Tensor, tuple, list)) and not isinstance(result, torch.Size):
            for argument in tree_leaves((args, kwargs)):
                self._count_read(argument, is_sum=adds, in_place=result is argument)
        return result

    def _count_read(self, argument: Any, *, is_sum: bool, in_place: bool) -> None:
        branch = getattr(argument, "_cps_branch", None) if isinstance(argument, Tensor) else None
        if branch is None or (in_place and not is_sum):  # an activation in place: still the same signal
            return
        branch.reads += 1
        if in_place:  # the tensor holds the sum from now on
            del argument._cps_branch  # pyright: ignore

    def _note(self, summands: Sequence[Any]) -> None:
        if len(summands) < 2 or not all(isinstance(summand, Tensor) for summand in summands[:2]):
            return
        first, second = summands[0], summands[1]
        branches = (getattr(first, "_cps_branch", None), getattr(second, "_cps_branch", None))
        if branches != (None, None) and first.shape == second.shape:
            sums = (first.abs().sum(dim=0), second.abs().sum(dim=0))
            self.additions.append(Addition(branches, sums, len(first)))


@contextmanager
def _hooks(backbone: nn.Module, names: Sequence[str], calls: dict[str, list[tuple[Tensor, int]]]) -> Iterator[None]:
    """Record the inputs of the layers in `calls`, and mark their outputs as branches."""
    handles = []

    def watch_layer(name: str, layer: nn.Module) -> None:
        def before(_module: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
            calls[name].append(_summed(layer, inputs[0] if inputs else named["input"]))

        def after(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            output._cps_branch = Branch(name, channel_axis_of(layer))  # pyright: ignore

        handles.append(layer.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(layer.register_forward_hook(after))

    def pass_on(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        source = getattr(inputs[0], "_cps_branch", None)
        if source is not None and output is not inputs[0]:
            output._cps_branch = Branch(source.weight, source.channel_axis, source)  # pyright: ignore

    for name in names:
        watch_layer(name, layer_of(backbone, name))
    for module in backbone.modules():
        if isinstance(module, PASS_THROUGH):
            handles.append(module.register_forward_hook(pass_on))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def channel_axis_of(layer: nn.Module) -> int:
    """Return the axis of a layer's output that counts its channels."""
    return 1 if isinstance(layer, nn.Conv2d) else -1


def _summed(layer: nn.Module, signal: Tensor) -> tuple[Tensor, int]:
    """Return the sum of the absolute input over images (and tokens, for `Linear`), and how many they are."""
    magnitude = signal.detach().abs().float()
    rows = magnitude if isinstance(layer, nn.Conv2d) else magnitude.reshape(-1, magnitude.shape[-1])
    return rows.sum(dim=0), len(rows)


def _add_up(activity: Activity, additions: list[Addition], images: int) -> None:
    met: dict[tuple[str | None, str | None], int] = {}
    for addition in additions:
        first, second = (branch.weight if branch else None for branch in addition.branches)
        key = first, second, met.setdefault((first, second), 0)
        met[first, second] += 1
        known = activity.additions.get(key)
        if known is None:
            activity.additions[key] = addition
        elif all(a.shape == b.shape for a, b in zip(known.sums, addition.sums, strict=True)):
            known.images += images
            for total, more in zip(known.sums, addition.sums, strict=True):
                total += more
