"""What flows through a network: the signals that pruning looks at.

`observe` needs one forward pass over the images. It sees the inputs of every shared layer and every
addition of two signals (a residual connection), in any module, without rewriting its forward.
`unread_channels` needs one backward pass more.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

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


@dataclass
class Activity:
    """Signals averaged over images.

    `inputs[name]` lists, for each call of that layer, the mean absolute input: (channels, height, width)
    for `Conv2d`, (features,) for `Linear`, where tokens are averaged too. `additions` hold sums: only their ratios matter.
    """

    inputs: dict[str, list[Tensor]] = field(default_factory=dict)
    additions: list[Addition] = field(default_factory=list)
    images: int = 0


@torch.no_grad()
def observe(backbone: nn.Module, names: Sequence[str], batches: Iterable[Tensor]) -> Activity:
    """Pass batches of pixels through the backbone in eval mode and return the signals, as means."""
    activity = Activity()
    backbone.eval()
    for pixels in batches:
        calls: dict[str, list[Tensor]] = {name: [] for name in names}
        watch = _AdditionWatch()
        with _hooks(backbone, names, calls), watch:
            backbone(pixels)
        _accumulate(activity, calls, watch.additions, len(pixels))
    for maps in activity.inputs.values():
        for total in maps:
            total /= activity.images
    return activity


def unread_channels(backbone: nn.Module, weights: dict[str, Tensor], batches: Iterable[Tensor]) -> dict[str, Tensor]:
    """Say which outputs of each shared layer the features do not depend on, with these weights.

    A channel that nothing reads has a gradient of exactly zero: backpropagation is the walk from the
    features to the channels, through whatever the module does on the way. Masks come back as (out,) bools.
    A layer that no gradient reaches (behind a `detach`, say) is left alone, since nothing is known of it.
    """
    backbone.eval()
    slopes: dict[str, Tensor] = {}

    def watch_output(name: str) -> Any:
        axis = _channel_axis(layer_of(backbone, name))

        def on_gradient(gradient: Tensor) -> None:
            slope = gradient.abs().transpose(axis, 0).flatten(1).amax(dim=1)
            slopes[name] = slopes[name].maximum(slope) if name in slopes else slope

        # A copy, since an activation may work in place on the output.
        def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
            if output.requires_grad:
                output.register_hook(on_gradient)
            return output.clone()

        return hook

    handles = [layer_of(backbone, name).register_forward_hook(watch_output(name)) for name in weights]
    try:
        for pixels in batches:
            pixels = pixels.detach().requires_grad_()
            features = functional_call(backbone, weights, (pixels,))
            direction = torch.randn(features.shape[1], generator=torch.Generator().manual_seed(0))
            torch.autograd.grad((features * direction.to(features)).sum(), pixels)
    finally:
        for handle in handles:
            handle.remove()
    return {
        name: slopes[name] == 0 if name in slopes else torch.zeros(len(w), dtype=torch.bool, device=w.device)
        for name, w in weights.items()
    }


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
            for argument in args:
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
            self.additions.append(Addition(branches, sums))


@contextmanager
def _hooks(backbone: nn.Module, names: Sequence[str], calls: dict[str, list[Tensor]]) -> Iterator[None]:
    """Record the inputs of the layers in `calls`, and mark their outputs as branches."""
    handles = []

    def watch_layer(name: str, layer: nn.Module) -> None:
        def before(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            calls[name].append(_summed(layer, inputs[0]))

        def after(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            output._cps_branch = Branch(name, _channel_axis(layer))  # pyright: ignore

        handles.extend([layer.register_forward_pre_hook(before), layer.register_forward_hook(after)])

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


def layer_of(backbone: nn.Module, weight: str) -> nn.Module:
    """Return the layer that a shared weight belongs to."""
    return backbone.get_submodule(weight.removesuffix("weight").removesuffix("."))


def _channel_axis(layer: nn.Module) -> int:
    return 1 if isinstance(layer, nn.Conv2d) else -1


def _summed(layer: nn.Module, signal: Tensor) -> Tensor:
    """Return the sum over images of the absolute input; tokens of a `Linear` layer are averaged."""
    magnitude = signal.detach().abs().float()
    if isinstance(layer, nn.Conv2d):
        return magnitude.sum(dim=0)
    if magnitude.ndim > 2:
        magnitude = magnitude.flatten(1, -2).mean(dim=1)
    return magnitude.sum(dim=0)


def _accumulate(activity: Activity, calls: dict[str, list[Tensor]], additions: list[Addition], images: int) -> None:
    activity.images += images
    for name, sums in calls.items():
        known = activity.inputs.setdefault(name, [torch.zeros_like(total) for total in sums])
        for total, more in zip(known, sums, strict=True):
            total += more
    if not activity.additions:
        activity.additions = additions
        return
    for known, more in zip(activity.additions, additions, strict=True):
        for total, summand in zip(known.sums, more.sums, strict=True):
            total += summand
