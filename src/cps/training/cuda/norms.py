"""Norms: batch norm on its way through a GPU, together with the addition and the ReLU that follow it."""

# pyright: reportArgumentType=false, reportCallIssue=false

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

import cps.training.cuda.norm_kernels as kernels
from cps.training.cuda.kernel_warmup import TYPICAL, launch

MOST_PARTS = 132  # one for each multiprocessor of a large GPU
TILE = 4096  # numbers that a program looks at in a step
STAGES = 4  # steps whose loads are under way at a time
WARPS = 4
FULL_ROWS = 64  # channels; with fewer, three or four signals under way at a time waste more than they gain
BLOCK = 2048  # numbers of a program that has nothing to add up


class Running(NamedTuple):
    """What a norm layer keeps of all batches: mean, variance, how many there were; and how fast the first two move."""

    mean: Tensor
    variance: Tensor
    batches: Tensor
    momentum: float


class Normalized(NamedTuple):
    """The result (which the way back needs only after a shortcut and a ReLU), and mean and scale of each channel."""

    result: Tensor
    mean: Tensor
    scale: Tensor


def normalize(
    signal: Tensor,
    weight: Tensor,
    bias: Tensor,
    running: Running,
    counts: Tensor,
    epsilon: float,
    *,
    shortcut: Tensor | None,
    has_relu: bool,
) -> Normalized:
    """Return the signal, shape (N, channels, height, width), normalised by its own moments, with what follows.

    `counts` are zeros, at least one for each 32 channels, that no other kernel uses at the same time.
    """
    channels, cut = signal.shape[1], _Cut.of(signal)
    mean, scale = _empty(2, channels, like=signal)
    firsts, seconds = _empty(2, cut.parts, channels, like=signal)
    launch(
        kernels.moments, (cut.parts, cut.blocks), signal, firsts, seconds, counts, mean, scale,
        running.mean, running.variance, running.batches, cut.rows, cut.steps, running.momentum, epsilon, channels,
        cut.block_rows, cut.block_channels, STAGES, num_warps=WARPS,
    )  # fmt: skip
    result = torch.empty_like(signal)
    launch(
        kernels.apply, (triton.cdiv(signal.numel(), BLOCK),), signal, signal if shortcut is None else shortcut, result,
        mean, scale, weight, bias, signal.numel(), channels, shortcut is not None, has_relu, BLOCK,
    )  # fmt: skip
    return Normalized(result, mean, scale)


def normalize_backward(
    gradients: Sequence[Tensor],
    done: Normalized,
    signal: Tensor,
    weight: Tensor,
    bias: Tensor,
    counts: Tensor,
    *,
    has_shortcut: bool,
    has_relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of signal, weight, bias and shortcut, from one or two that add up to that of the result."""
    channels, cut, has_other = signal.shape[1], _Cut.of(signal), len(gradients) > 1
    of_weight, of_bias = _empty(2, channels, like=signal)
    firsts, seconds = _empty(2, cut.parts, channels, like=signal)
    is_stored = has_other or (has_shortcut and has_relu)
    slopes = torch.empty_like(signal) if is_stored else gradients[0]
    launch(
        kernels.sums_of_gradient, (cut.parts, cut.blocks), gradients[0], gradients[-1], done.result,
        signal, slopes, done.mean, done.scale, weight, bias, firsts, seconds, counts, of_weight,
        of_bias, cut.rows, cut.steps, channels, has_other, has_shortcut, has_relu, cut.block_rows, cut.block_channels,
        STAGES if channels >= FULL_ROWS else 1, num_warps=WARPS,
    )  # fmt: skip
    of_signal = torch.empty_like(signal)
    launch(
        kernels.gradient_of_signal, (triton.cdiv(signal.numel(), BLOCK),), slopes, signal, done.mean, done.scale,
        weight, bias, of_weight, of_bias, of_signal, signal.numel(), 1 / cut.rows, channels,
        has_relu and not is_stored, BLOCK,
    )  # fmt: skip
    return of_signal, of_weight, of_bias, slopes if has_shortcut else None


class _Cut(NamedTuple):
    """How the rows are cut into steps of a block, taken in turn by so many programs (`parts`)."""

    rows: int
    parts: int
    blocks: int
    steps: int
    block_rows: int
    block_channels: int

    @staticmethod
    def of(signal: Tensor) -> "_Cut":
        number, channels, height, width = signal.shape
        rows, typical = number * height * width, TYPICAL * height * width
        block_channels = 32 if channels <= 32 else 64
        blocks = triton.cdiv(channels, block_channels)
        wanted = max(1, MOST_PARTS // blocks)
        block_rows = min(TILE // block_channels, max(16, triton.next_power_of_2(triton.cdiv(typical, wanted))))
        steps = triton.cdiv(rows, block_rows * wanted)
        return _Cut(rows, triton.cdiv(rows, block_rows * steps), blocks, steps, block_rows, block_channels)


def _empty(*shape: int, like: Tensor) -> Tensor:
    return torch.empty(*shape, dtype=torch.float32, device=like.device)
