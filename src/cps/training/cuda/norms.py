"""Batch norm with the addition and the ReLU after it, forward and backward, by the kernels of `norm_kernels`."""

# pyright: reportArgumentType=false, reportCallIssue=false

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

import cps.training.cuda.norm_kernels as kernels
from cps.training.cuda.kernel_warmup import TYPICAL_BATCH, launch

MAX_PARTS = 132  # programs; one for each multiprocessor of a large GPU
TILE = 4096  # numbers that a program reads in a step
STAGES = 4  # steps whose loads overlap
WARPS = 4
MIN_PIPELINED_CHANNELS = 64  # with fewer, overlapping the loads of three or four tensors costs more than it gains
BLOCK = 2048  # numbers per program of the elementwise kernels


class RunningStatistics(NamedTuple):
    """The running mean and variance of a batch norm layer, its number of batches, and the momentum."""

    mean: Tensor
    variance: Tensor
    batches: Tensor
    momentum: float


class Normalized(NamedTuple):
    """The result, and the mean and scale (1 / standard deviation) of each channel.

    The backward pass reads the result only after a shortcut and a ReLU.
    """

    result: Tensor
    mean: Tensor
    scale: Tensor


def normalize(
    signal: Tensor,
    weight: Tensor,
    bias: Tensor,
    running: RunningStatistics,
    counters: Tensor,
    epsilon: float,
    *,
    shortcut: Tensor | None,
    has_relu: bool,
) -> Normalized:
    """Return batch norm of a signal (N, channels, height, width), plus the shortcut, after the ReLU.

    `counters` are zeros, at least one per 32 channels, which no other kernel may use at the same time.
    """
    channels, tiling = signal.shape[1], _Tiling.choose(signal)
    mean, scale = _empty(2, channels, like=signal)
    sums, square_sums = _empty(2, tiling.parts, channels, like=signal)
    launch(
        kernels.moments, (tiling.parts, tiling.blocks), signal, sums, square_sums, counters, mean, scale,
        running.mean, running.variance, running.batches, tiling.rows, tiling.steps, running.momentum, epsilon, channels,
        tiling.block_rows, tiling.block_channels, STAGES, num_warps=WARPS,
    )  # fmt: skip
    result = torch.empty_like(signal)
    launch(
        kernels.apply, (triton.cdiv(signal.numel(), BLOCK),), signal, signal if shortcut is None else shortcut, result,
        mean, scale, weight, bias, signal.numel(), channels, shortcut is not None, has_relu, BLOCK,
    )  # fmt: skip
    return Normalized(result, mean, scale)


def normalize_backward(
    gradients: Sequence[Tensor],
    normalized: Normalized,
    signal: Tensor,
    weight: Tensor,
    bias: Tensor,
    counters: Tensor,
    *,
    has_shortcut: bool,
    has_relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of signal, weight, bias and shortcut.

    `gradients` are one or two tensors that add up to the gradient of the result.
    """
    channels, tiling, has_other = signal.shape[1], _Tiling.choose(signal), len(gradients) > 1
    weight_gradient, bias_gradient = _empty(2, channels, like=signal)
    weight_sums, bias_sums = _empty(2, tiling.parts, channels, like=signal)
    is_stored = has_other or (has_shortcut and has_relu)
    before_relu = torch.empty_like(signal) if is_stored else gradients[0]
    launch(
        kernels.gradient_sums, (tiling.parts, tiling.blocks), gradients[0], gradients[-1], normalized.result,
        signal, before_relu, normalized.mean, normalized.scale, weight, bias, weight_sums, bias_sums, counters,
        weight_gradient, bias_gradient, tiling.rows, tiling.steps, channels, has_other, has_shortcut, has_relu,
        tiling.block_rows, tiling.block_channels, STAGES if channels >= MIN_PIPELINED_CHANNELS else 1, num_warps=WARPS,
    )  # fmt: skip
    signal_gradient = torch.empty_like(signal)
    launch(
        kernels.signal_gradient, (triton.cdiv(signal.numel(), BLOCK),), before_relu, signal, normalized.mean,
        normalized.scale, weight, bias, weight_gradient, bias_gradient, signal_gradient, signal.numel(),
        1 / tiling.rows, channels, has_relu and not is_stored, BLOCK,
    )  # fmt: skip
    return signal_gradient, weight_gradient, bias_gradient, before_relu if has_shortcut else None


class _Tiling(NamedTuple):
    """How the rows are divided: `parts` programs take turns at steps of `block_rows` rows."""

    rows: int
    parts: int
    blocks: int
    steps: int
    block_rows: int
    block_channels: int

    @staticmethod
    def choose(signal: Tensor) -> "_Tiling":
        number, channels, height, width = signal.shape
        rows, typical_rows = number * height * width, TYPICAL_BATCH * height * width
        block_channels = 32 if channels <= 32 else 64
        blocks = triton.cdiv(channels, block_channels)
        max_parts = max(1, MAX_PARTS // blocks)
        block_rows = min(TILE // block_channels, max(16, triton.next_power_of_2(triton.cdiv(typical_rows, max_parts))))
        steps = triton.cdiv(rows, block_rows * max_parts)
        return _Tiling(rows, triton.cdiv(rows, block_rows * steps), blocks, steps, block_rows, block_channels)


def _empty(*shape: int, like: Tensor) -> Tensor:
    return torch.empty(*shape, dtype=torch.float32, device=like.device)
