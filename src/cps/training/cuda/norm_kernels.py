"""Kernels in Triton: batch norm with the addition and the ReLU that follow it, two kernels forward and two backward.

Signals have their channels last: they are rows of channels. All programs together sweep over them once, each with loads
under way for its next steps, and the last to finish adds up what each has found, in a fixed order: the same inputs
always give the same bits.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl

AT_ONCE = tl.constexpr(32)  # parts that are added up in a step


@triton.jit
def _channels(CHANNELS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr):
    """Return the channels of this program's block, and which of them there are."""
    channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    return channel, channel < CHANNELS


@triton.jit
def _places(step, channel, known, rows, CHANNELS: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Return where the numbers of one step of this program lie, and which of them there are."""
    row = (step * tl.num_programs(0) + tl.program_id(0)) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    return row[:, None] * CHANNELS + channel[None, :], (row < rows)[:, None] & known[None, :]


@triton.jit
def _is_last(firsts, seconds, finished, first, second, channel, known, CHANNELS: tl.constexpr):
    """Store the sums of this program's part; say whether those of all others are there, and count anew then."""
    place = tl.program_id(0) * CHANNELS + channel
    tl.store(firsts + place, tl.sum(first, axis=0), mask=known)
    tl.store(seconds + place, tl.sum(second, axis=0), mask=known)
    tl.debug_barrier()  # every thread has stored its sums
    is_last = tl.atomic_add(finished + tl.program_id(1), 1) == tl.num_programs(0) - 1
    if is_last:
        tl.store(finished + tl.program_id(1), 0)
    return is_last


@triton.jit
def _total(sums, channel, known, CHANNELS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr):
    """Add up what each program has stored."""
    found = tl.zeros([AT_ONCE, BLOCK_CHANNELS], dtype=tl.float32)
    for first in range(0, tl.num_programs(0), AT_ONCE):
        part = first + tl.arange(0, AT_ONCE)
        there = (part < tl.num_programs(0))[:, None] & known[None, :]
        found += tl.load(sums + part[:, None] * CHANNELS + channel[None, :], mask=there, other=0.0)
    return tl.sum(found, axis=0)


@triton.jit(do_not_specialize=["rows", "steps"])
def moments(
    signal,
    firsts,
    seconds,
    finished,
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
    """Find mean and scale (one over the deviation) of each channel, and move the running ones."""
    channel, known = _channels(CHANNELS, BLOCK_CHANNELS)
    origin = tl.load(signal + channel, mask=known, other=0.0).to(tl.float32)  # near the mean, so nothing cancels
    first = tl.zeros([BLOCK_ROWS, BLOCK_CHANNELS], dtype=tl.float32)
    second = tl.zeros([BLOCK_ROWS, BLOCK_CHANNELS], dtype=tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        place, inside = _places(step, channel, known, rows, CHANNELS, BLOCK_ROWS)
        value = tl.load(signal + place, mask=inside, other=0.0).to(tl.float32)
        apart = tl.where(inside, value - origin[None, :], 0.0)
        first += apart
        second += apart * apart
    if _is_last(firsts, seconds, finished, first, second, channel, known, CHANNELS):
        apart = _total(firsts, channel, known, CHANNELS, BLOCK_CHANNELS) / rows
        variance = _total(seconds, channel, known, CHANNELS, BLOCK_CHANNELS) / rows - apart * apart
        variance = tl.maximum(variance, 0.0)
        tl.store(mean + channel, origin + apart, mask=known)
        tl.store(scale + channel, 1.0 / tl.sqrt(variance + epsilon), mask=known)
        old = tl.load(running_mean + channel, mask=known)
        tl.store(running_mean + channel, old + momentum * (origin + apart - old), mask=known)
        old = tl.load(running_variance + channel, mask=known)
        unbiased = variance * (rows / (rows - 1.0))
        tl.store(running_variance + channel, old + momentum * (unbiased - old), mask=known)
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
    """Normalise; add the shortcut; keep what is positive."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, channel = place < size, place % CHANNELS
    value = tl.load(signal + place, mask=inside, other=0.0).to(tl.float32)
    value = (value - tl.load(mean + channel)) * tl.load(scale + channel)
    value = value * tl.load(weight + channel) + tl.load(bias + channel)
    if HAS_SHORTCUT:
        value += tl.load(shortcut + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_RELU:
        value = tl.where(value < 0, 0.0, value)  # what is no number stays none, so that it shows in the loss
    tl.store(result + place, value.to(result.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "steps"])
def sums_of_gradient(
    gradient,
    other,
    result,
    signal,
    slopes,
    mean,
    scale,
    weight,
    bias,
    firsts,
    seconds,
    finished,
    of_weight,
    of_bias,
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
    """Find the gradients of weight and bias; with a shortcut or two gradients, store that before the ReLU in `slopes`.

    What the ReLU saw was positive where the result is; without a shortcut, it was the normalised signal.
    """
    channel, known = _channels(CHANNELS, BLOCK_CHANNELS)
    middle = tl.load(mean + channel, mask=known, other=0.0)[None, :]
    factor = tl.load(scale + channel, mask=known, other=0.0)[None, :]
    slant = tl.load(weight + channel, mask=known, other=0.0)[None, :]
    shift = tl.load(bias + channel, mask=known, other=0.0)[None, :]
    first = tl.zeros([BLOCK_ROWS, BLOCK_CHANNELS], dtype=tl.float32)
    second = tl.zeros([BLOCK_ROWS, BLOCK_CHANNELS], dtype=tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        place, inside = _places(step, channel, known, rows, CHANNELS, BLOCK_ROWS)
        value = (tl.load(signal + place, mask=inside, other=0.0).to(tl.float32) - middle) * factor
        slope = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
        if HAS_OTHER:
            slope += tl.load(other + place, mask=inside, other=0.0).to(tl.float32)
        if HAS_RELU:
            seen = tl.load(result + place, mask=inside, other=0.0) if HAS_SHORTCUT else value * slant + shift
            slope = tl.where(seen > 0, slope, 0.0)
        if HAS_OTHER or (HAS_SHORTCUT and HAS_RELU):
            tl.store(slopes + place, slope.to(slopes.dtype.element_ty), mask=inside)
        first += slope * value
        second += slope
    if _is_last(firsts, seconds, finished, first, second, channel, known, CHANNELS):
        tl.store(of_weight + channel, _total(firsts, channel, known, CHANNELS, BLOCK_CHANNELS), mask=known)
        tl.store(of_bias + channel, _total(seconds, channel, known, CHANNELS, BLOCK_CHANNELS), mask=known)


@triton.jit
def gradient_of_signal(
    slopes,
    signal,
    mean,
    scale,
    weight,
    bias,
    of_weight,
    of_bias,
    of_signal,
    size,
    share,
    CHANNELS: tl.constexpr,
    HAS_RELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the gradient of the signal, from that after the ReLU if it has one; `share` is one over the rows."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, channel = place < size, place % CHANNELS
    factor, slant = tl.load(scale + channel), tl.load(weight + channel)
    value = tl.load(signal + place, mask=inside, other=0.0).to(tl.float32)
    value = (value - tl.load(mean + channel)) * factor
    slope = tl.load(slopes + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_RELU:
        slope = tl.where(value * slant + tl.load(bias + channel) > 0, slope, 0.0)
    slope -= (tl.load(of_bias + channel) + value * tl.load(of_weight + channel)) * share
    slope *= slant * factor
    tl.store(of_signal + place, slope.to(of_signal.dtype.element_ty), mask=inside)
