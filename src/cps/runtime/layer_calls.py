"""Record what `F.conv2d` and `F.linear` receive inside the layers of a module.

A layer may pad its input or compute its weight in its own `forward`. Then neither its input nor its parameter is what
is convolved.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

ARGUMENTS: dict[Any, tuple[str, ...]] = {
    F.conv2d: ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    F.linear: ("input", "weight", "bias"),
}


@dataclass(frozen=True)
class Convolution:
    """The geometry of a convolution; `padding` is (left, right, top, bottom), as `F.pad` takes it."""

    stride: tuple[int, int]
    padding: tuple[int, int, int, int]
    dilation: tuple[int, int]
    groups: int


@dataclass(frozen=True, eq=False)
class LayerCall:
    """What one call of `F.conv2d`, or of `F.linear` (`convolution` is None), received."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    convolution: Convolution | None = None


@contextmanager
def record_layer_calls(layers: Mapping[str, nn.Module], on_call: Callable[[str, LayerCall], None]) -> Iterator[None]:
    """Call `on_call(name, call)` whenever a layer passes a weight of its own weight's shape to one of the functions."""
    recorder = _Recorder(layers, on_call)

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: recorder.running.append(name)

    def leave(*_: Any) -> None:
        recorder.running.pop()

    handles = [layer.register_forward_pre_hook(enter(name)) for name, layer in layers.items()]
    handles += [layer.register_forward_hook(leave) for layer in layers.values()]
    try:
        with recorder:
            yield
    finally:
        for handle in handles:
            handle.remove()


class _Recorder(TorchFunctionMode):
    """Intercepts every torch operation; `running` are the layers that run, the innermost one last."""

    def __init__(self, layers: Mapping[str, nn.Module], on_call: Callable[[str, LayerCall], None]):
        super().__init__()
        self.layers, self.on_call = layers, on_call
        self.running: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.running and func in ARGUMENTS:
            name = self.running[-1]
            call = _read_call(**dict(zip(ARGUMENTS[func], args, strict=False)), **kwargs, is_linear=func is F.linear)
            if call.weight.shape == self.layers[name].weight.shape:
                self.on_call(name, call)
        return func(*args, **kwargs)


def _read_call(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    *,
    is_linear: bool,
) -> LayerCall:
    if is_linear:
        return LayerCall(input, weight, bias)
    stride, dilation = _pair(stride), _pair(dilation)
    sides = _padding(padding, weight.shape[2:], dilation)
    return LayerCall(input, weight, bias, Convolution(stride, sides, dilation, groups))


def _padding(padding: Any, kernel_size: tuple[int, ...], dilation: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the padding on each side: "same" pads by what the kernel takes, the odd pixel at the end."""
    if padding == "valid":
        return 0, 0, 0, 0
    if padding == "same":
        rows, columns = (step * (size - 1) for step, size in zip(dilation, kernel_size, strict=True))
        return columns // 2, columns - columns // 2, rows // 2, rows - rows // 2
    rows, columns = _pair(padding)
    return columns, columns, rows, rows


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    values = tuple(value)
    return values * 2 if len(values) == 1 else values
