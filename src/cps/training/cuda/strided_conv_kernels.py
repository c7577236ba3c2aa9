"""A kernel in Triton: the gradient of the input of a convolution with a stride.

Every STRIDE-th row and column of the input was seen by the same taps of the kernel. Those are added up together, and no
tap is multiplied with zeros.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from cps.training.cuda.kernel_warmup import TYPICAL, launch


@triton.jit(do_not_specialize=["pixels"])
def _spread(
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
    """Find the gradient of some pixels that the same taps have seen."""
    BLOCKS: tl.constexpr = (OUTPUTS + BLOCK_OUTPUTS - 1) // BLOCK_OUTPUTS
    pixel = tl.program_id(0) * BLOCK_PIXELS + tl.arange(0, BLOCK_PIXELS)
    channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    first_row, first_column = tl.program_id(2) // STRIDE, tl.program_id(2) % STRIDE
    image = pixel // (HEIGHT // STRIDE * (WIDTH // STRIDE))
    high = pixel // (WIDTH // STRIDE) % (HEIGHT // STRIDE)
    wide = pixel % (WIDTH // STRIDE)
    total = tl.zeros([BLOCK_PIXELS, BLOCK_CHANNELS], dtype=tl.float32)
    for step in range(KERNEL * KERNEL * BLOCKS):
        tap = step // BLOCKS
        up, left = first_row + PADDING - tap // KERNEL, first_column + PADDING - tap % KERNEL
        if (up % STRIDE == 0) & (left % STRIDE == 0):
            output = (step % BLOCKS) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
            row, column = high + up // STRIDE, wide + left // STRIDE
            inside = (pixel < pixels) & (row >= 0) & (row < ROWS) & (column >= 0) & (column < COLUMNS)
            place = ((image * ROWS + row) * COLUMNS + column) * OUTPUTS
            known = (output < OUTPUTS)[None, :]
            slope = tl.load(gradient + place[:, None] + output[None, :], mask=inside[:, None] & known, other=0.0)
            there = (output[:, None] * KERNEL * KERNEL + tap) * CHANNELS + channel[None, :]
            known = (output < OUTPUTS)[:, None] & (channel < CHANNELS)[None, :]
            total = tl.dot(slope, tl.load(weight + there, mask=known, other=0.0), total)
    row, column = high * STRIDE + first_row, wide * STRIDE + first_column
    place = ((image * HEIGHT + row) * WIDTH + column) * CHANNELS
    known = (pixel < pixels)[:, None] & (channel < CHANNELS)[None, :]
    tl.store(result + place[:, None] + channel[None, :], total.to(result.dtype.element_ty), mask=known)


def strided_input_gradient(
    gradient: Tensor, weight: Tensor, size: tuple[int, int], stride: int, padding: int
) -> Tensor:
    """Return the gradient of images of a height and width, multiples of the stride, from that of the outputs."""
    _, channels, kernel, _ = weight.shape
    number, outputs, rows, columns = gradient.shape
    height, width = size
    pixels, typical = number * height * width // stride**2, TYPICAL * height * width // stride**2
    block_channels, block_outputs = (32 if wide <= 32 else 64 for wide in (channels, outputs))
    block_pixels = 128 if typical >= 8192 else 64
    shape = number, channels, height, width
    result = torch.empty(shape, dtype=gradient.dtype, device=gradient.device, memory_format=torch.channels_last)
    launch(
        _spread, (triton.cdiv(pixels, block_pixels), triton.cdiv(channels, block_channels), stride**2), gradient,
        weight, result, pixels, height, width, channels, rows, columns, outputs, kernel, stride, padding, block_pixels,
        block_outputs, block_channels,
    )  # fmt: skip
    return result
