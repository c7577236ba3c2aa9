"""Triton kernels: convolutions and their gradients, for few channels, channels not divisible by 64, and strided 1x1.

There the deterministic kernels of cuDNN are slow: on an H200, by 2 to 16 times for the gradient of the weight, and by
up to 2.5 times for the others. Images are channels last, so the inputs of one kernel row (its taps times their
channels) are contiguous. Sums have a fixed order, so the same inputs always give the same bits. Block sizes depend on
the size of an image, not on the batch size, so the last, smaller batch of an epoch needs no further kernels. Input
gradients of strided convolutions are in `strided_conv_kernels`.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cps.training.cuda.kernel_warmup import TYPICAL_BATCH, launch

BLOCK_PIXELS = 64  # in the gradient of the weight


@triton.jit(do_not_specialize=["pixels", "steps"])
def _weight_gradient(
    images,
    gradient,
    parts,
    pixels,
    steps,
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
    BLOCK_TAPS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sum image times gradient over the pixels of one part, for one row of the convolution kernel."""
    ROW_SIZE: tl.constexpr = KERNEL * CHANNELS
    ROW_BLOCKS: tl.constexpr = (ROW_SIZE + BLOCK_TAPS - 1) // BLOCK_TAPS
    kernel_row = tl.program_id(0) // ROW_BLOCKS
    entry = (tl.program_id(0) % ROW_BLOCKS) * BLOCK_TAPS + tl.arange(0, BLOCK_TAPS)
    output = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    part = tl.program_id(2)
    total = tl.zeros([BLOCK_TAPS, BLOCK_OUTPUTS], dtype=tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        pixel = (part * steps + step) * BLOCK_PIXELS + tl.arange(0, BLOCK_PIXELS)
        image = pixel // (ROWS * COLUMNS)
        row = (pixel % (ROWS * COLUMNS)) // COLUMNS * STRIDE + kernel_row - PADDING
        column = pixel % COLUMNS * STRIDE - PADDING
        tap = column[:, None] + (entry // CHANNELS)[None, :]
        mask = ((pixel < pixels) & (row >= 0) & (row < HEIGHT))[:, None] & (tap >= 0) & (tap < WIDTH)
        offset = ((image * HEIGHT + row) * WIDTH + column) * CHANNELS
        patch = tl.load(images + offset[:, None] + entry[None, :], mask=mask & (entry < ROW_SIZE)[None, :], other=0.0)
        gradient_mask = (pixel < pixels)[:, None] & (output < OUTPUTS)[None, :]
        grad = tl.load(gradient + pixel[:, None] * OUTPUTS + output[None, :], mask=gradient_mask, other=0.0)
        total = tl.dot(tl.trans(patch), grad, total)
    offset = ((part * OUTPUTS + output[None, :]) * KERNEL + kernel_row) * ROW_SIZE + entry[:, None]
    tl.store(parts + offset, total, mask=(output < OUTPUTS)[None, :] & (entry < ROW_SIZE)[:, None])


class Tiling(NamedTuple):
    """How the gradient of a weight is divided: `num_parts` parts of the pixels, each of `steps` blocks."""

    num_parts: int
    steps: int
    pixels: int
    block_taps: int
    block_outputs: int

    @staticmethod
    def choose(images: Tensor, gradient: Tensor, kernel: int) -> "Tiling":
        """Return a division into enough parts to fill a GPU."""
        number, outputs, rows, columns = gradient.shape
        pixels, row_size = number * rows * columns, kernel * images.shape[1]
        block_taps = 32 if row_size <= 32 else 128 if 64 < row_size <= 128 else 64
        block_outputs = 32 if outputs <= 32 else 128 if 64 < outputs <= 128 else 64
        blocks = kernel * triton.cdiv(row_size, block_taps) * triton.cdiv(outputs, block_outputs)
        max_parts = max(1, (600 if TYPICAL_BATCH * rows * columns >= 32768 else 300) // blocks)
        steps = triton.cdiv(pixels, BLOCK_PIXELS * max_parts)
        return Tiling(triton.cdiv(pixels, BLOCK_PIXELS * steps), steps, pixels, block_taps, block_outputs)


def weight_gradient_parts(images: Tensor, gradient: Tensor, kernel: int, stride: int, padding: int) -> Tensor:
    """Return parts that add up to the gradient of the weight, shape (parts, outputs, channels, kernel, kernel).

    `images` is the input of the convolution and `gradient` that of its output, both channels last.
    """
    _, channels, height, width = images.shape
    _, outputs, rows, columns = gradient.shape
    tiling = Tiling.choose(images, gradient, kernel)
    parts = torch.empty(tiling.num_parts, outputs, kernel, kernel, channels, dtype=torch.float32, device=images.device)
    blocks = kernel * triton.cdiv(kernel * channels, tiling.block_taps), triton.cdiv(outputs, tiling.block_outputs)
    launch(
        _weight_gradient, (*blocks, tiling.num_parts), images, gradient, parts, tiling.pixels, tiling.steps,
        height, width, channels, rows, columns, outputs, kernel, stride, padding, BLOCK_PIXELS, tiling.block_taps,
        tiling.block_outputs, 4 if outputs > 128 else 2,
    )  # fmt: skip
    return parts.permute(0, 1, 4, 2, 3)


@triton.jit(do_not_specialize=["pixels"])
def _convolve(
    images,
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
    IS_BACKWARD: tl.constexpr,
    BLOCK_PIXELS: tl.constexpr,
    BLOCK_TAPS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Convolve a block of pixels. With IS_BACKWARD, compute the input gradient of the convolution with this weight."""
    ROW_SIZE: tl.constexpr = KERNEL * CHANNELS
    ROW_BLOCKS: tl.constexpr = (ROW_SIZE + BLOCK_TAPS - 1) // BLOCK_TAPS
    pixel = tl.program_id(0) * BLOCK_PIXELS + tl.arange(0, BLOCK_PIXELS)
    output = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    image = pixel // (ROWS * COLUMNS)
    first_row = (pixel % (ROWS * COLUMNS)) // COLUMNS * STRIDE - PADDING
    column = pixel % COLUMNS * STRIDE - PADDING
    total = tl.zeros([BLOCK_PIXELS, BLOCK_OUTPUTS], dtype=tl.float32)
    for step in tl.range(0, KERNEL * ROW_BLOCKS, num_stages=STAGES):
        kernel_row = step // ROW_BLOCKS
        entry = (step % ROW_BLOCKS) * BLOCK_TAPS + tl.arange(0, BLOCK_TAPS)
        row = first_row + kernel_row
        tap = column[:, None] + (entry // CHANNELS)[None, :]
        mask = ((pixel < pixels) & (row >= 0) & (row < HEIGHT))[:, None] & (tap >= 0) & (tap < WIDTH)
        offset = ((image * HEIGHT + row) * WIDTH + column) * CHANNELS
        patch = tl.load(images + offset[:, None] + entry[None, :], mask=mask & (entry < ROW_SIZE)[None, :], other=0.0)
        if IS_BACKWARD:  # the kernel is flipped, and its channels are the outputs
            flipped = (KERNEL - 1 - kernel_row) * KERNEL + KERNEL - 1 - entry // CHANNELS
            weight_offset = ((entry % CHANNELS) * KERNEL * KERNEL + flipped)[:, None] * OUTPUTS + output[None, :]
        else:
            weight_offset = (output[None, :] * KERNEL + kernel_row) * ROW_SIZE + entry[:, None]
        weight_mask = (entry < ROW_SIZE)[:, None] & (output < OUTPUTS)[None, :]
        total = tl.dot(patch, tl.load(weight + weight_offset, mask=weight_mask, other=0.0), total)
    result_mask = (pixel < pixels)[:, None] & (output < OUTPUTS)[None, :]
    tl.store(result + pixel[:, None] * OUTPUTS + output[None, :], total.to(result.dtype.element_ty), mask=result_mask)


def convolve(images: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """Return the convolution of images; images and weight are channels last."""
    outputs, _, kernel, _ = weight.shape
    rows, columns = ((size + 2 * padding - kernel) // stride + 1 for size in images.shape[2:])
    return _launch(images, weight, (outputs, rows, columns), stride, padding, is_backward=False)


def input_gradient(gradient: Tensor, weight: Tensor, padding: int) -> Tensor:
    """Return the gradient of the input of a convolution with stride 1 from that of its output."""
    _, channels, kernel, _ = weight.shape
    height, width = (size + kernel - 1 - 2 * padding for size in gradient.shape[2:])
    return _launch(gradient, weight, (channels, height, width), 1, kernel - 1 - padding, is_backward=True)


def _launch(
    images: Tensor, weight: Tensor, shape: tuple[int, int, int], stride: int, padding: int, *, is_backward: bool
) -> Tensor:
    number, channels, height, width = images.shape
    outputs, rows, columns = shape
    pixels, typical_pixels, kernel = number * rows * columns, TYPICAL_BATCH * rows * columns, weight.shape[2]
    block_outputs = 32 if outputs <= 32 else 64
    block_taps = 32 if typical_pixels >= 65536 or kernel * channels <= 32 else 64
    block_pixels = 128 if typical_pixels >= 8192 else 64
    warps = 8 if block_pixels == 128 and (typical_pixels >= 65536 or outputs > 64) else 4
    result = torch.empty((number, *shape), dtype=images.dtype, device=images.device, memory_format=torch.channels_last)
    launch(
        _convolve, (triton.cdiv(pixels, block_pixels), triton.cdiv(outputs, block_outputs)), images, weight, result,
        pixels, height, width, channels, rows, columns, outputs, kernel, stride, padding, is_backward, block_pixels,
        block_taps, block_outputs, 2 if outputs <= 32 else 4, num_warps=warps,
    )  # fmt: skip
    return result
