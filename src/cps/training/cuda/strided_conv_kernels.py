"""Triton kernel: the gradient of the input of a strided convolution.

The same taps of the convolution kernel read every STRIDE-th row and column of the input. A program handles pixels with
the same taps, so that it multiplies no zeros.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from cps.training.cuda.kernel_warmup import TYPICAL_BATCH, launch


@triton.jit(do_not_specialize=["pixels"])
def _strided_input_gradient(
    gradient,
    weight,
    result,
    pixels,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    BLOCK_PIXELS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    """Compute the gradient of a block of pixels that the same taps read."""
    BLOCKS: tl.constexpr = (OUTPUTS + BLOCK_OUTPUTS - 1) // BLOCK_OUTPUTS
    pixel = tl.program_id(0) * BLOCK_PIXELS + tl.arange(0, BLOCK_PIXELS)
    channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    first_row, first_column = tl.program_id(2) // STRIDE, tl.program_id(2) % STRIDE
    image = pixel // (HEIGHT // STRIDE * (WIDTH // STRIDE))
    block_row = pixel // (WIDTH // STRIDE) % (HEIGHT // STRIDE)
    block_column = pixel % (WIDTH // STRIDE)
    total = tl.zeros([BLOCK_PIXELS, BLOCK_CHANNELS], dtype=tl.float32)
    for step in range(KERNEL * KERNEL * BLOCKS):
        tap = step // BLOCKS
        row_shift, column_shift = first_row + PADDING - tap // KERNEL, first_column + PADDING - tap % KERNEL
        if (row_shift % STRIDE == 0) & (column_shift % STRIDE == 0):
            output = (step % BLOCKS) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
            row, column = block_row + row_shift // STRIDE, block_column + column_shift // STRIDE
            mask = (pixel < pixels) & (row >= 0) & (row < ROWS) & (column >= 0) & (column < COLUMNS)
            offset = ((image * ROWS + row) * COLUMNS + column) * OUTPUTS
            gradient_mask = mask[:, None] & (output < OUTPUTS)[None, :]
            grad = tl.load(gradient + offset[:, None] + output[None, :], mask=gradient_mask, other=0.0)
            weight_offset = (output[:, None] * KERNEL * KERNEL + tap) * CHANNELS + channel[None, :]
            weight_mask = (output < OUTPUTS)[:, None] & (channel < CHANNELS)[None, :]
            total = tl.dot(grad, tl.load(weight + weight_offset, mask=weight_mask, other=0.0), total)
    row, column = block_row * STRIDE + first_row, block_column * STRIDE + first_column
    offset = ((image * HEIGHT + row) * WIDTH + column) * CHANNELS
    result_mask = (pixel < pixels)[:, None] & (channel < CHANNELS)[None, :]
    tl.store(result + offset[:, None] + channel[None, :], total.to(result.dtype.element_ty), mask=result_mask)


def strided_input_gradient(
    gradient: Tensor, weight: Tensor, size: tuple[int, int], stride: int, padding: int
) -> Tensor:
    """Return the gradient of the input from that of the output; `size`, (height, width), must divide by the stride."""
    _, channels, kernel, _ = weight.shape
    number, outputs, rows, columns = gradient.shape
    height, width = size
    pixels, typical_pixels = number * height * width // stride**2, TYPICAL_BATCH * height * width // stride**2
    block_channels, block_outputs = (32 if count <= 32 else 64 for count in (channels, outputs))
    block_pixels = 128 if typical_pixels >= 8192 else 64
    grid = triton.cdiv(pixels, block_pixels), triton.cdiv(channels, block_channels), stride**2
    shape = number, channels, height, width
    result = torch.empty(shape, dtype=gradient.dtype, device=gradient.device, memory_format=torch.channels_last)
    launch(
        _strided_input_gradient, grid, gradient, weight, result, pixels, height, width, channels, rows, columns,
        outputs, kernel, stride, padding, block_pixels, block_outputs, block_channels,
    )  # fmt: skip
    return result
