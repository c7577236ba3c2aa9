"""Triton kernels: batch norm with the addition and the ReLU after it, two kernels forward and two backward.

Signals are channels last, so they are rows of channels. All programs together read the rows once, and overlap the
loads of their next steps. The last program to finish adds up the partial sums in a fixed order, so the same inputs
always give the same bits.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl

BLOCK_PARTS = tl.constexpr(32)  # partial sums that are added up in a step


@triton.jit
def _channels(CHANNELS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr):
    """Return the channels of this program's block, and a mask of those that exist."""
    channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    return channel, channel < CHANNELS


@triton.jit
def _offsets(step, channel, channel_mask, rows, CHANNELS: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Return the offsets of the numbers of one step of this program, and a mask of those that exist."""
    row = (step * tl.num_programs(0) + tl.program_id(0)) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    return row[:, None] * CHANNELS + channel[None, :], (row < rows)[:, None] & channel_mask[None, :]


@triton.jit
def _is_last(sums1, sums2, counters, sum1, sum2, channel, channel_mask, CHANNELS: tl.constexpr):
    """Store the partial sums of this program; return True in the last program, which also resets the counter."""
    offset = tl.program_id(0) * CHANNELS + channel
    tl.store(sums1 + offset, tl.sum(sum1, axis=0), mask=channel_mask)
    tl.store(sums2 + offset, tl.sum(sum2, axis=0), mask=channel_mask)
    tl.debug_barrier()  # every thread has stored its sums
    is_last = tl.atomic_add(counters + tl.program_id(1), 1) == tl.num_programs(0) - 1
    if is_last:
        tl.store(counters + tl.program_id(1), 0)
    return is_last


@triton.jit
def _total(sums, channel, channel_mask, CHANNELS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr):
    """Add up the partial sums of all programs."""
    total = tl.zeros([BLOCK_PARTS, BLOCK_CHANNELS], dtype=tl.float32)
    for first in range(0, tl.num_programs(0), BLOCK_PARTS):
        part = first + tl.arange(0, BLOCK_PARTS)
        mask = (part < tl.num_programs(0))[:, None] & channel_mask[None, :]
        total += tl.load(sums + part[:, None] * CHANNELS + channel[None, :], mask=mask, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit(do_not_specialize=["rows", "steps"])
def moments(
    signal,
    sums,
    square_sums,
    counters,
    mean,
    scale,
    running_mean,
    running_variance,
    batches,
    rows,
    steps,
    momentum,
    epsilon,
    CHANNELS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute mean and scale (1 / standard deviation) of each channel, and update the running statistics."""
    channel, channel_mask = _channels(CHANNELS, BLOCK_CHANNELS)
    # The first value is near the mean: subtracting it avoids cancellation.
    origin = tl.load(signal + channel, mask=channel_mask, other=0.0).to(tl.float32)
    sum1 = tl.zeros([BLOCK_ROWS, BLOCK_CHANNELS], dtype=tl.float32)
    sum2 = tl.zeros([BLOCK_ROWS, BLOCK_CHANNELS], dtype=tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        offset, mask = _offsets(step, channel, channel_mask, rows, CHANNELS, BLOCK_ROWS)
        value = tl.load(signal + offset, mask=mask, other=0.0).to(tl.float32)
        deviation = tl.where(mask, value - origin[None, :], 0.0)
        sum1 += deviation
        sum2 += deviation * deviation
    if _is_last(sums, square_sums, counters, sum1, sum2, channel, channel_mask, CHANNELS):
        deviation = _total(sums, channel, channel_mask, CHANNELS, BLOCK_CHANNELS) / rows
        variance = _total(square_sums, channel, channel_mask, CHANNELS, BLOCK_CHANNELS) / rows - deviation * deviation
        variance = tl.maximum(variance, 0.0)
        tl.store(mean + channel, origin + deviation, mask=channel_mask)
        tl.store(scale + channel, 1.0 / tl.sqrt(variance + epsilon), mask=channel_mask)
        old = tl.load(running_mean + channel, mask=channel_mask)
        tl.store(running_mean + channel, old + momentum * (origin + deviation - old), mask=channel_mask)
        old = tl.load(running_variance + channel, mask=channel_mask)
        unbiased = variance * (rows / (rows - 1.0))
        tl.store(running_variance + channel, old + momentum * (unbiased - old), mask=channel_mask)
        if tl.program_id(1) == 0:
            tl.store(batches, tl.load(batches) + 1)


@triton.jit
def apply(
    signal,
    shortcut,
    result,
    mean,
    scale,
    weight,
    bias,
    size,
    CHANNELS: tl.constexpr,
    HAS_SHORTCUT: tl.constexpr,
    HAS_RELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalise, add the shortcut, apply the ReLU."""
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask, channel = offset < size, offset % CHANNELS
    value = tl.load(signal + offset, mask=mask, other=0.0).to(tl.float32)
    value = (value - tl.load(mean + channel)) * tl.load(scale + channel)
    value = value * tl.load(weight + channel) + tl.load(bias + channel)
    if HAS_SHORTCUT:
        value += tl.load(shortcut + offset, mask=mask, other=0.0).to(tl.float32)
    if HAS_RELU:
        value = tl.where(value < 0, 0.0, value)  # keeps NaN, so that it reaches the loss
    tl.store(result + offset, value.to(result.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "steps"])
def gradient_sums(
    gradient,
    other,
    result,
    signal,
    before_relu,
    mean,
    scale,
    weight,
    bias,
    weight_sums,
    bias_sums,
    counters,
    weight_gradient,
    bias_gradient,
    rows,
    steps,
    CHANNELS: tl.constexpr,
    HAS_OTHER: tl.constexpr,
    HAS_SHORTCUT: tl.constexpr,
    HAS_RELU: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute the gradients of weight and bias.

    With two gradients, or a shortcut and a ReLU, also store the gradient of the ReLU's input in `before_relu`. That
    input was positive where the result is; without a shortcut, it was the normalised signal.
    """
    channel, channel_mask = _channels(CHANNELS, BLOCK_CHANNELS)
    center = tl.load(mean + channel, mask=channel_mask, other=0.0)[None, :]
    factor = tl.load(scale + channel, mask=channel_mask, other=0.0)[None, :]
    gain = tl.load(weight + channel, mask=channel_mask, other=0.0)[None, :]
    shift = tl.load(bias + channel, mask=channel_mask, other=0.0)[None, :]
    weight_sum = tl.zeros([BLOCK_ROWS, BLOCK_CHANNELS], dtype=tl.float32)
    bias_sum = tl.zeros([BLOCK_ROWS, BLOCK_CHANNELS], dtype=tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        offset, mask = _offsets(step, channel, channel_mask, rows, CHANNELS, BLOCK_ROWS)
        value = (tl.load(signal + offset, mask=mask, other=0.0).to(tl.float32) - center) * factor
        grad = tl.load(gradient + offset, mask=mask, other=0.0).to(tl.float32)
        if HAS_OTHER:
            grad += tl.load(other + offset, mask=mask, other=0.0).to(tl.float32)
        if HAS_RELU:
            relu_input = tl.load(result + offset, mask=mask, other=0.0) if HAS_SHORTCUT else value * gain + shift
            grad = tl.where(relu_input > 0, grad, 0.0)
        if HAS_OTHER or (HAS_SHORTCUT and HAS_RELU):
            tl.store(before_relu + offset, grad.to(before_relu.dtype.element_ty), mask=mask)
        weight_sum += grad * value
        bias_sum += grad
    if _is_last(weight_sums, bias_sums, counters, weight_sum, bias_sum, channel, channel_mask, CHANNELS):
        tl.store(
            weight_gradient + channel,
            _total(weight_sums, channel, channel_mask, CHANNELS, BLOCK_CHANNELS),
            mask=channel_mask,
        )
        tl.store(
            bias_gradient + channel,
            _total(bias_sums, channel, channel_mask, CHANNELS, BLOCK_CHANNELS),
            mask=channel_mask,
        )


@triton.jit
def signal_gradient(
    gradient,
    signal,
    mean,
    scale,
    weight,
    bias,
    weight_gradient,
    bias_gradient,
    result,
    size,
    inverse_rows,
    CHANNELS: tl.constexpr,
    HAS_RELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradient of the signal from that of the ReLU's input, or of its output with HAS_RELU."""
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask, channel = offset < size, offset % CHANNELS
    factor, gain = tl.load(scale + channel), tl.load(weight + channel)
    value = tl.load(signal + offset, mask=mask, other=0.0).to(tl.float32)
    value = (value - tl.load(mean + channel)) * factor
    grad = tl.load(gradient + offset, mask=mask, other=0.0).to(tl.float32)
    if HAS_RELU:
        grad = tl.where(value * gain + tl.load(bias + channel) > 0, grad, 0.0)
    grad -= (tl.load(bias_gradient + channel) + value * tl.load(weight_gradient + channel)) * inverse_rows
    grad *= gain * factor
    tl.store(result + offset, grad.to(result.dtype.element_ty), mask=mask)
