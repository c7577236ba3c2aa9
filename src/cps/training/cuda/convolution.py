"""A convolution layer that trains fast on a GPU and always gives the same bits.

It uses custom kernels where the deterministic kernels of cuDNN are slow. In the backward pass, the gradient of the
weight is computed on a side stream, while the main stream continues.
"""

from typing import Any

import torch
from torch import Tensor, nn

from cps.runtime.cuda_graphs import side_stream
from cps.runtime.extras import is_installed

HAS_TRITON = is_installed("triton")
KERNEL_DTYPE = torch.bfloat16
# Input times output channels up to which the custom kernels are faster than cuDNN's: in general, and for strided 1x1.
MAX_CHANNEL_PRODUCT = 128 * 128
MAX_POINTWISE_CHANNEL_PRODUCT = 256 * 512


class FastConv2d(nn.Conv2d):
    """A convolution with a fast backward pass under bf16 autocast on a GPU; elsewhere a plain convolution.

    `bf16_weight` is a copy of the weight in bf16, and `weight_gradient` receives the gradient of the weight. Both are
    optional; whoever sets them must refresh the copy and read the gradient.
    """

    bf16_weight: Tensor | None = None
    weight_gradient: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Return the convolution of the input."""
        if not is_cuda_autocast(input):
            return super().forward(input)
        images = input.to(KERNEL_DTYPE).contiguous(memory_format=torch.channels_last)
        tensors = images, self.weight, self.bf16_weight, self.weight_gradient
        out = _Convolve.apply(*tensors, self.stride[0], self.padding[0])
        return out if self.bias is None else out + self.bias.to(out.dtype)[:, None, None]


def is_cuda_autocast(signal: Tensor) -> bool:
    """Return True if a tensor is on a GPU under autocast, where the custom kernels can be used."""
    return signal.is_cuda and torch.is_autocast_enabled("cuda")


def use_fast_convolutions(module: nn.Module) -> None:
    """Turn all supported convolutions inside a module into `FastConv2d`, in place."""
    for layer in module.modules():
        if type(layer) is nn.Conv2d and HAS_TRITON and _is_supported(layer):
            layer.__class__ = FastConv2d


def _is_supported(layer: nn.Conv2d) -> bool:
    is_square = all(len(set(sizes)) == 1 for sizes in (layer.kernel_size, layer.stride, layer.padding))
    is_plain = layer.groups == 1 and set(layer.dilation) == {1} and layer.padding_mode == "zeros"
    return is_square and is_plain and not isinstance(layer.padding, str)


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        images: Tensor,
        weight: Tensor,
        bf16_weight: Tensor | None,
        weight_gradient: Tensor | None,
        stride: int,
        padding: int,
    ) -> Tensor:
        if bf16_weight is None:
            bf16_weight = weight.to(images.dtype, memory_format=torch.channels_last)
        ctx.save_for_backward(images, bf16_weight)
        ctx.stride, ctx.padding, ctx.weight_gradient = stride, padding, weight_gradient
        return convolution(images, bf16_weight, stride, padding)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        images, weight = ctx.saved_tensors
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        arguments = gradient, images, weight, ctx.stride, ctx.padding
        if needs_weight and ctx.weight_gradient is None:
            input_gradient, parts = convolution_backward(*arguments, needs_input)
            return input_gradient if needs_input else None, _sum_parts(parts), None, None, None, None
        if needs_weight:  # the caller waits for the side stream before it reads the gradient
            out = ctx.weight_gradient
            side_stream(images.device).start(lambda: _weight_gradient(*arguments, out=out), gradient, images)
        return _input_gradient(*arguments) if needs_input else None, None, None, None, None, None


@torch.library.custom_op("cps::convolution", mutates_args=())
def convolution(images: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """Return the convolution of images; all tensors are channels last."""
    if _prefers_custom_kernel(weight, stride, images):
        from cps.training.cuda.conv_kernels import convolve  # Triton is installed only with GPU builds of torch

        return convolve(images, weight, stride, padding)
    out = torch.ops.aten.convolution(images, weight, None, *_aten_arguments(stride, padding))
    return out.contiguous(memory_format=torch.channels_last)


@convolution.register_fake
def _(images: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    outputs, _, kernel, _ = weight.shape
    rows, columns = ((size + 2 * padding - kernel) // stride + 1 for size in images.shape[2:])
    return images.new_empty(images.shape[0], rows, columns, outputs).permute(0, 3, 1, 2)


@torch.library.custom_op("cps::convolution_backward", mutates_args=())
def convolution_backward(
    gradient: Tensor, images: Tensor, weight: Tensor, stride: int, padding: int, needs_input: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the input (empty if not needed), and parts of the gradient of the weight.

    The parts are not added up here, since a compiler can fuse the sum with what follows.
    """
    arguments = gradient, images, weight, stride, padding
    if not needs_input:
        return gradient.new_empty(0), _weight_gradient(*arguments)
    side = side_stream(images.device)
    parts = side.start(lambda: _weight_gradient(*arguments), gradient, images)
    input_gradient = _input_gradient(*arguments)
    side.join()
    return input_gradient, parts


@convolution_backward.register_fake
def _(gradient: Tensor, images: Tensor, weight: Tensor, stride: int, padding: int, needs_input: bool):
    outputs, channels, kernel, _ = weight.shape
    num_parts = 1
    if _prefers_custom_kernel(weight, stride, images, gradient):
        from cps.training.cuda.conv_kernels import Tiling

        num_parts = Tiling.choose(images, gradient, kernel).num_parts
    parts = weight.new_empty(num_parts, outputs, kernel, kernel, channels, dtype=torch.float32)
    return torch.empty_like(images) if needs_input else gradient.new_empty(0), parts.permute(0, 1, 4, 2, 3)


def _input_gradient(gradient: Tensor, images: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    height, width = images.shape[2:]
    is_custom = _prefers_custom_kernel(weight, stride, images, gradient)
    if is_custom and stride == 1:
        from cps.training.cuda.conv_kernels import input_gradient

        return input_gradient(gradient, weight, padding)
    if is_custom and height % stride == width % stride == 0:
        from cps.training.cuda.strided_conv_kernels import strided_input_gradient

        return strided_input_gradient(gradient, weight, (height, width), stride, padding)
    arguments = _aten_arguments(stride, padding)
    found = torch.ops.aten.convolution_backward(gradient, images, weight, None, *arguments, [True, False, False])[0]
    return found.contiguous(memory_format=torch.channels_last)


def _weight_gradient(
    gradient: Tensor, images: Tensor, weight: Tensor, stride: int, padding: int, out: Tensor | None = None
) -> Tensor:
    """Return parts that add up to the gradient of the weight, or write their sum to `out`."""
    if _prefers_custom_kernel(weight, stride, images, gradient):
        from cps.training.cuda.conv_kernels import weight_gradient_parts

        parts = weight_gradient_parts(images, gradient, weight.shape[2], stride, padding)
        return parts if out is None else _sum_parts(parts, out)
    arguments = _aten_arguments(stride, padding)
    found = torch.ops.aten.convolution_backward(gradient, images, weight, None, *arguments, [False, True, False])[1]
    return found.to(torch.float32, memory_format=torch.channels_last)[None] if out is None else out.copy_(found)


def _sum_parts(parts: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the sum of parts (parts, outputs, channels, rows, columns), which are channels last."""
    if out is None and len(parts) == 1:
        return parts[0]
    target = None if out is None else out.permute(0, 2, 3, 1)
    return torch.sum(parts.permute(0, 1, 3, 4, 2), dim=0, out=target).permute(0, 3, 1, 2)


def _prefers_custom_kernel(weight: Tensor, stride: int, *signals: Tensor) -> bool:
    """Return True if the custom kernels are faster than cuDNN's for this weight, and their 32-bit offsets suffice."""
    outputs, channels, kernel, _ = weight.shape
    numel = max(signal.shape[0] * signal.shape[2] * signal.shape[3] for signal in signals) * max(outputs, channels)
    is_small = outputs * channels <= MAX_CHANNEL_PRODUCT and bool(outputs % 64 or channels % 64)
    is_pointwise = outputs * channels <= MAX_POINTWISE_CHANNEL_PRODUCT and kernel == 1 and stride > 1
    return (is_small or is_pointwise) and numel < 2**31


def _aten_arguments(stride: int, padding: int) -> tuple[Any, ...]:
    return [stride, stride], [padding, padding], [1, 1], False, [0, 0], 1
