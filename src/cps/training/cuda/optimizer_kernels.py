"""Kernels in Triton: an optimizer's step on a vector, and what a guard puts back after it, in one.

PyTorch's fused optimizers give a vector of a million numbers to twenty programs only: most of a GPU waits.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cps.training.cuda.kernel_warmup import launch

BLOCK = 1024  # numbers of a program


@triton.jit
def _load(vector, gradient, place, inside):
    """Return numbers of the vector and their gradients."""
    return tl.load(vector + place, mask=inside, other=0.0), tl.load(gradient + place, mask=inside, other=0.0)


@triton.jit
def _store(vector, moved, free, value, place, inside):
    """Store what was moved, where it may move, and the kept value elsewhere."""
    moved = moved * tl.load(free + place, mask=inside, other=0.0) + tl.load(value + place, mask=inside, other=0.0)
    tl.store(vector + place, moved, mask=inside)


@triton.jit
def _sgd(vector, gradient, free, value, buffer, rate, size, momentum, decay, BLOCK: tl.constexpr):
    """Do a step of SGD with momentum."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    now, slope = _load(vector, gradient, place, inside)
    speed = momentum * tl.load(buffer + place, mask=inside, other=0.0) + slope + decay * now
    tl.store(buffer + place, speed, mask=inside)
    _store(vector, now - tl.load(rate) * speed, free, value, place, inside)


@triton.jit
def _adam(
    vector,
    gradient,
    free,
    value,
    first,
    second,
    step,
    rate,
    size,
    new1,
    beta2,
    new2,
    log_beta1,
    log_beta2,
    epsilon,
    decay,
    IS_APART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Do a step of Adam, or of AdamW, whose decay is apart from the gradient; `new1` and `new2` are 1 - beta."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, pace, steps = place < size, tl.load(rate), tl.load(step).to(tl.float64)
    now, slope = _load(vector, gradient, place, inside)
    if IS_APART:
        now *= 1 - pace * decay
    else:
        slope += decay * now
    mean = tl.load(first + place, mask=inside, other=0.0)
    mean += new1 * (slope - mean)
    square = beta2 * tl.load(second + place, mask=inside, other=0.0) + new2 * slope * slope
    tl.store(first + place, mean, mask=inside)
    tl.store(second + place, square, mask=inside)
    share1 = (1 - tl.exp(steps * log_beta1)).to(tl.float32)  # of the mean that is not of its first value, zero
    share2 = (1 - tl.exp(steps * log_beta2)).to(tl.float32)
    moved = now - pace / share1 * mean / (tl.sqrt(square) / tl.sqrt(share2) + epsilon)
    _store(vector, moved, free, value, place, inside)


def own_update(
    optimizer: torch.optim.Optimizer, vector: Tensor, free: Tensor, value: Tensor
) -> Callable[[], None] | None:
    """Return what does the optimizer's step on a vector and sets it to itself times `free` plus `value`.

    The optimizer has done a step, so that it has a state. Return None if it is not one of those known here.
    """
    (group,) = optimizer.param_groups
    if any(group.get(unusual) for unusual in ("amsgrad", "maximize", "nesterov", "dampening")):
        return None
    kind = type(optimizer)
    if kind is torch.optim.SGD and group["momentum"]:
        return partial(_sgd_step, group, optimizer.state[vector], vector, free, value)
    if kind in (torch.optim.Adam, torch.optim.AdamW) and all(isinstance(b, float) and b for b in group["betas"]):
        is_apart = kind is torch.optim.AdamW or bool(group.get("decoupled_weight_decay"))
        return partial(_adam_step, group, optimizer.state[vector], is_apart, vector, free, value)
    return None


def _sgd_step(group: dict[str, Any], state: dict[str, Tensor], vector: Tensor, free: Tensor, value: Tensor) -> None:
    launch(
        _sgd, _grid(vector), vector, vector.grad, free, value, state["momentum_buffer"], group["lr"], vector.numel(),
        group["momentum"], group["weight_decay"], BLOCK,
    )  # fmt: skip


def _adam_step(
    group: dict[str, Any], state: dict[str, Tensor], is_apart: bool, vector: Tensor, free: Tensor, value: Tensor
) -> None:
    state["step"].add_(1)
    beta1, beta2 = group["betas"]
    launch(
        _adam, _grid(vector), vector, vector.grad, free, value, state["exp_avg"], state["exp_avg_sq"], state["step"],
        group["lr"], vector.numel(), 1 - beta1, beta2, 1 - beta2, math.log(beta1), math.log(beta2), group["eps"],
        group["weight_decay"], is_apart, BLOCK,
    )  # fmt: skip


def _grid(vector: Tensor) -> tuple[int]:
    return (triton.cdiv(vector.numel(), BLOCK),)
