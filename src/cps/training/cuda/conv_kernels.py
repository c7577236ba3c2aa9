"""Kernels in Triton: convolutions and their gradients, where channels are few or no multiple of 64 or one tap strides.

There cuDNN's deterministic kernels are slow: those of the weight's gradient by 2 to 16 times on an H200, the others by
up to 2.5 times. Images have their channels last, so what one row of the kernel sees (its taps and their channels) is
contiguous. Sums are taken in a fixed order: the same inputs always give the same bits. Work is cut into blocks by the
size of an image, not by how many there are: the last batch of an epoch, a smaller one, needs no kernels of its own.
Input gradients of strided convolutions are in strided_kernels.py.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cps.training.cuda.kernel_warmup import TYPICAL, launch

BLOCK_PIXELS = 64  # of the weight's gradient


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
    """Add up, for one row of the kernel, image times gradient over the pixels of one part."""
    SEEN: tl.constexpr = KERNEL * CHANNELS
    BLOCKS: tl.constexpr = (SEEN + BLOCK_TAPS - 1) // BLOCK_TAPS
    kernel_row = tl.program_id(0) // BLOCKS
    seen = (tl.program_id(0) % BLOCKS) * BLOCK_TAPS + tl.arange(0, BLOCK_TAPS)
    output = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    part = tl.program_id(2)
    total = tl.zeros([BLOCK_TAPS, BLOCK_OUTPUTS], dtype=tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        pixel = (part * steps + step) * BLOCK_PIXELS + tl.arange(0, BLOCK_PIXELS)
        image = pixel // (ROWS * COLUMNS)
        row = (pixel % (ROWS * COLUMNS)) // COLUMNS * STRIDE + kernel_row - PADDING
        column = pixel % COLUMNS * STRIDE - PADDING
        tap = column[:, None] + (seen // CHANNELS)[None, :]
        inside = ((pixel < pixels) & (row >= 0) & (row < HEIGHT))[:, None] & (tap >= 0) & (tap < WIDTH)
        place = ((image * HEIGHT + row) * WIDTH + column) * CHANNELS
        patch = tl.load(images + place[:, None] + seen[None, :], mask=inside & (seen < SEEN)[None, :], other=0.0)
        known = (pixel < pixels)[:, None] & (output < OUTPUTS)[None, :]
        slope = tl.load(gradient + pixel[:, None] * OUTPUTS + output[None, :], mask=known, other=0.0)
        total = tl.dot(tl.trans(patch), slope, total)
    place = ((part * OUTPUTS + output[None, :]) * KERNEL + kernel_row) * SEEN + seen[:, None]
    tl.store(parts + place, total, mask=(output < OUTPUTS)[None, :] & (seen < SEEN)[:, None])


class Cut(NamedTuple):
    """How the work on a weight's gradient is cut: the pixels into so many parts, each of some steps of a block."""

    number: int
    steps: int
    pixels: int
    taps: int
    outputs: int

    @staticmethod
    def of(images: Tensor, gradient: Tensor, kernel: int) -> "Cut":
        """Return a cut into parts that are enough to fill a GPU."""
        number, outputs, rows, columns = gradient.shape
        pixels, seen = number * rows * columns, kernel * images.shape[1]
        block_taps = 32 if seen <= 32 else 128 if 64 < seen <= 128 else 64
        block_outputs = 32 if outputs <= 32 else 128 if 64 < outputs <= 128 else 64
        blocks = kernel * triton.cdiv(seen, block_taps) * triton.cdiv(outputs, block_outputs)
        wanted = max(1, (600 if TYPICAL * rows * columns >= 32768 else 300) // blocks)
        steps = triton.cdiv(pixels, BLOCK_PIXELS * wanted)
        return Cut(triton.cdiv(pixels, BLOCK_PIXELS * steps), steps, pixels, block_taps, block_outputs)


def weight_gradient_parts(images: Tensor, gradient: Tensor, kernel: int, stride: int, padding: int) -> Tensor:
    """Return parts that add up to the gradient of a convolution's weight, (parts, outputs, channels, kernel, kernel).

    `images` are what the convolution saw and `gradient` that of its outputs, both with channels last.
    """
    _, channels, height, width = images.shape
    _, outputs, rows, columns = gradient.shape
    cut = Cut.of(images, gradient, kernel)
    parts = torch.empty(cut.number, outputs, kernel, kernel, channels, dtype=torch.float32, device=images.device)
    blocks = kernel * triton.cdiv(kernel * channels, cut.taps), triton.cdiv(outputs, cut.outputs)
    launch(
        _weight_gradient, (*blocks, cut.number), images, gradient, parts, cut.pixels, cut.steps, height, width,
        channels, rows, columns, outputs, kernel, stride, padding, BLOCK_PIXELS, cut.taps, cut.outputs,
        4 if outputs > 128 else 2,
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
    """Convolve some pixels; backward, the weight is that of the convolution whose input's gradient is computed."""
    SEEN: tl.constexpr = KERNEL * CHANNELS
    BLOCKS: tl.constexpr = (SEEN + BLOCK_TAPS - 1) // BLOCK_TAPS
    pixel = tl.program_id(0) * BLOCK_PIXELS + tl.arange(0, BLOCK_PIXELS)
    output = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    image = pixel // (ROWS * COLUMNS)
    first_row = (pixel % (ROWS * COLUMNS)) // COLUMNS * STRIDE - PADDING
    column = pixel % COLUMNS * STRIDE - PADDING
    total = tl.zeros([BLOCK_PIXELS, BLOCK_OUTPUTS], dtype=tl.float32)
    for step in tl.range(0, KERNEL * BLOCKS, num_stages=STAGES):
        kernel_row = step // BLOCKS
        seen = (step % BLOCKS) * BLOCK_TAPS + tl.arange(0, BLOCK_TAPS)
        row = first_row + kernel_row
        tap = column[:, None] + (seen // CHANNELS)[None, :]
        inside = ((pixel < pixels) & (row >= 0) & (row < HEIGHT))[:, None] & (tap >= 0) & (tap < WIDTH)
        place = ((image * HEIGHT + row) * WIDTH + column) * CHANNELS
        patch = tl.load(images + place[:, None] + seen[None, :], mask=inside & (seen < SEEN)[None, :], other=0.0)
        if IS_BACKWARD:  # kernels are read the other way round, and their channels are the outputs
            turned = (KERNEL - 1 - kernel_row) * KERNEL + KERNEL - 1 - seen // CHANNELS
            there = ((seen % CHANNELS) * KERNEL * KERNEL + turned)[:, None] * OUTPUTS + output[None, :]
        else:
            there = (output[None, :] * KERNEL + kernel_row) * SEEN + seen[:, None]
        known = (seen < SEEN)[:, None] & (output < OUTPUTS)[None, :]
        total = tl.dot(patch, tl.load(weight + there, mask=known, other=0.0), total)
    known = (pixel < pixels)[:, None] & (output < OUTPUTS)[None, :]
    tl.store(result + pixel[:, None] * OUTPUTS + output[None, :], total.to(result.dtype.element_ty), mask=known)


def convolve(images: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """Return the convolution of images; they and the weight have their channels last."""
    outputs, _, kernel, _ = weight.shape
    rows, columns = ((size + 2 * padding - kernel) // stride + 1 for size in images.shape[2:])
    return _launch(images, weight, (outputs, rows, columns), stride, padding, is_backward=False)


def input_gradient(gradient: Tensor, weight: Tensor, padding: int) -> Tensor:
    """Return the gradient of the input of a convolution of stride 1, from that of its outputs."""
    _, channels, kernel, _ = weight.shape
    height, width = (size + kernel - 1 - 2 * padding for size in gradient.shape[2:])
    return _launch(gradient, weight, (channels, height, width), 1, kernel - 1 - padding, is_backward=True)


def _launch(
    images: Tensor, weight: Tensor, shape: tuple[int, int, int], stride: int, padding: int, *, is_backward: bool
) -> Tensor:
    number, channels, height, width = images.shape
    outputs, rows, columns = shape
    pixels, typical, kernel = number * rows * columns, TYPICAL * rows * columns, weight.shape[2]
    block_outputs = 32 if outputs <= 32 else 64
    block_taps = 32 if typical >= 65536 or kernel * channels <= 32 else 64
    block_pixels = 128 if typical >= 8192 else 64
    warps = 8 if block_pixels == 128 and (typical >= 65536 or outputs > 64) else 4
    result = torch.empty((number, *shape), dtype=images.dtype, device=images.device, memory_format=torch.channels_last)
    launch(
        _convolve, (triton.cdiv(pixels, block_pixels), triton.cdiv(outputs, block_outputs)), images, weight, result,
        pixels, height, width, channels, rows, columns, outputs, kernel, stride, padding, is_backward, block_pixels,
        block_taps, block_outputs, 2 if outputs <= 32 else 4, num_warps=warps,
    )  # fmt: skip
    return result
