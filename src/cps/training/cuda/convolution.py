"""Convolution: the layer that a GPU trains fast, with the same numbers each time.

Our own kernels are used where cuDNN has no fast ones that always give the same bits. Backward, the gradient of the
weight is computed beside all that follows, on a stream of its own.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from cps.runtime.side_stream import side_stream_of

HAS_TRITON = find_spec("triton") is not None
KERNEL_TYPE = torch.bfloat16
LARGEST = 128 * 128  # channels in times out, up to which our kernel is the faster one where they are awkward
LARGEST_POINT = 256 * 512  # ... and where a convolution of one tap has a stride


class Convolution(nn.Conv2d):
    """A convolution with a fast backward pass under bf16 autocast on a GPU; elsewhere a plain one.

    `bf16` is its weight in bf16 and `place` where its weight's gradient goes, if somebody keeps the one up to date
    and reads the other.
    """

    bf16: Tensor | None = None
    place: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Return the convolved signal."""
        if not runs_in_bf16(input):
            return super().forward(input)
        seen = input.to(KERNEL_TYPE).contiguous(memory_format=torch.channels_last)
        out = _Convolve.apply(seen, self.weight, self.bf16, self.place, self.stride[0], self.padding[0])
        return out if self.bias is None else out + self.bias.to(out.dtype)[:, None, None]


def runs_in_bf16(signal: Tensor) -> bool:
    """Say whether a signal is on a GPU under autocast, where our own kernels serve."""
    return signal.is_cuda and torch.is_autocast_enabled("cuda")


def quicken(module: nn.Module) -> None:
    """Turn the convolutions inside a module, where they are of the common kind, into fast ones."""
    for layer in module.modules():
        if type(layer) is nn.Conv2d and HAS_TRITON and _is_common(layer):
            layer.__class__ = Convolution


def _is_common(layer: nn.Conv2d) -> bool:
    is_square = all(len(set(sizes)) == 1 for sizes in (layer.kernel_size, layer.stride, layer.padding))
    is_plain = layer.groups == 1 and set(layer.dilation) == {1} and layer.padding_mode == "zeros"
    return is_square and is_plain and not isinstance(layer.padding, str)


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, seen: Tensor, weight: Tensor, bf16: Tensor | None, place: Tensor | None, stride: int, padding: int
    ) -> Tensor:
        if bf16 is None:
            bf16 = weight.to(seen.dtype, memory_format=torch.channels_last)
        ctx.save_for_backward(seen, bf16)
        ctx.stride, ctx.padding, ctx.place = stride, padding, place
        return convolution(seen, bf16, stride, padding)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        seen, weight = ctx.saved_tensors
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        how = gradient, seen, weight, ctx.stride, ctx.padding
        if needs_weight and ctx.place is None:
            of_input, parts = convolution_backward(*how, needs_input)
            return of_input if needs_input else None, _sum_of(parts), None, None, None, None
        if needs_weight:  # whoever gave the place will wait for it
            side_stream_of(seen.device).start(lambda: _of_weight(*how, into=ctx.place), gradient, seen)
        return _of_input(*how) if needs_input else None, None, None, None, None, None


@torch.library.custom_op("cps::convolution", mutates_args=())
def convolution(seen: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """Return the convolution of images, all with channels last."""
    if _is_awkward(weight, stride, seen):
        from cps.training.cuda.conv_kernels import convolve  # Triton is there only where GPUs are

        return convolve(seen, weight, stride, padding)
    found = torch.ops.aten.convolution(seen, weight, None, *_arguments(stride, padding))
    return found.contiguous(memory_format=torch.channels_last)


@convolution.register_fake
def _(seen: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    outputs, _, kernel, _ = weight.shape
    rows, columns = ((size + 2 * padding - kernel) // stride + 1 for size in seen.shape[2:])
    return seen.new_empty(seen.shape[0], rows, columns, outputs).permute(0, 3, 1, 2)


@torch.library.custom_op("cps::convolution_backward", mutates_args=())
def convolution_backward(
    gradient: Tensor, seen: Tensor, weight: Tensor, stride: int, padding: int, needs_input: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradient of a convolution's input (empty where it is not needed), and parts of that of its weight.

    The parts are still to be added up, which a compiler does well.
    """
    how = gradient, seen, weight, stride, padding
    if not needs_input:
        return gradient.new_empty(0), _of_weight(*how)
    aside = side_stream_of(seen.device)
    parts = aside.start(lambda: _of_weight(*how), gradient, seen)
    of_input = _of_input(*how)
    aside.join()
    return of_input, parts


@convolution_backward.register_fake
def _(gradient: Tensor, seen: Tensor, weight: Tensor, stride: int, padding: int, needs_input: bool):
    outputs, channels, kernel, _ = weight.shape
    number = 1
    if _is_awkward(weight, stride, seen, gradient):
        from cps.training.cuda.conv_kernels import Cut

        number = Cut.of(seen, gradient, kernel).number
    parts = weight.new_empty(number, outputs, kernel, kernel, channels, dtype=torch.float32).permute(0, 1, 4, 2, 3)
    return torch.empty_like(seen) if needs_input else gradient.new_empty(0), parts


def _of_input(gradient: Tensor, seen: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    height, width = seen.shape[2:]
    is_awkward = _is_awkward(weight, stride, seen, gradient)
    if is_awkward and stride == 1:
        from cps.training.cuda.conv_kernels import input_gradient

        return input_gradient(gradient, weight, padding)
    if is_awkward and height % stride == width % stride == 0:
        from cps.training.cuda.strided_conv_kernels import strided_input_gradient

        return strided_input_gradient(gradient, weight, (height, width), stride, padding)
    arguments = _arguments(stride, padding)
    found = torch.ops.aten.convolution_backward(gradient, seen, weight, None, *arguments, [True, False, False])[0]
    return found.contiguous(memory_format=torch.channels_last)


def _of_weight(
    gradient: Tensor, seen: Tensor, weight: Tensor, stride: int, padding: int, into: Tensor | None = None
) -> Tensor:
    if _is_awkward(weight, stride, seen, gradient):
        from cps.training.cuda.conv_kernels import weight_gradient_parts

        parts = weight_gradient_parts(seen, gradient, weight.shape[2], stride, padding)
        return parts if into is None else _sum_of(parts, into)
    arguments = _arguments(stride, padding)
    found = torch.ops.aten.convolution_backward(gradient, seen, weight, None, *arguments, [False, True, False])[1]
    return found.to(torch.float32, memory_format=torch.channels_last)[None] if into is None else into.copy_(found)


def _sum_of(parts: Tensor, into: Tensor | None = None) -> Tensor:
    """Return the sum of parts (parts, outputs, channels, rows, columns), channels last as they are."""
    if into is None and len(parts) == 1:
        return parts[0]
    there = None if into is None else into.permute(0, 2, 3, 1)
    return torch.sum(parts.permute(0, 1, 3, 4, 2), dim=0, out=there).permute(0, 3, 1, 2)


def _is_awkward(weight: Tensor, stride: int, *signals: Tensor) -> bool:
    """Say whether our kernels are faster than cuDNN's for this weight, and can count so far."""
    outputs, channels, kernel, _ = weight.shape
    largest = max(signal.shape[0] * signal.shape[2] * signal.shape[3] for signal in signals) * max(outputs, channels)
    is_small = outputs * channels <= LARGEST and bool(outputs % 64 or channels % 64)
    is_point = outputs * channels <= LARGEST_POINT and kernel == 1 and stride > 1
    return (is_small or is_point) and largest < 2**31


def _arguments(stride: int, padding: int) -> tuple[Any, ...]:
    return [stride, stride], [padding, padding], [1, 1], False, [0, 0], 1
