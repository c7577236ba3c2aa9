"""Triton kernels: one kernel takes the optimizer step on a vector and restores the guarded entries.

PyTorch's fused optimizers divide a vector of a million numbers among only twenty programs, so most of the GPU is idle.
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

BLOCK = 1024  # numbers per program


@triton.jit
def _load(vector, gradient, offset, mask):
    """Return a block of the vector and of its gradient."""
    return tl.load(vector + offset, mask=mask, other=0.0), tl.load(gradient + offset, mask=mask, other=0.0)


@triton.jit
def _store(vector, updated, free, value, offset, mask):
    """Store `updated` where the vector is free, and the guarded value elsewhere."""
    updated = updated * tl.load(free + offset, mask=mask, other=0.0) + tl.load(value + offset, mask=mask, other=0.0)
    tl.store(vector + offset, updated, mask=mask)


@triton.jit
def _sgd(vector, gradient, free, value, buffer, rate, size, momentum, decay, BLOCK: tl.constexpr):
    """Take a step of SGD with momentum."""
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < size
    param, grad = _load(vector, gradient, offset, mask)
    velocity = momentum * tl.load(buffer + offset, mask=mask, other=0.0) + grad + decay * param
    tl.store(buffer + offset, velocity, mask=mask)
    _store(vector, param - tl.load(rate) * velocity, free, value, offset, mask)


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
    IS_DECOUPLED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Take a step of Adam, or of AdamW (decoupled weight decay); `new1` and `new2` are 1 - beta."""
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask, lr, steps = offset < size, tl.load(rate), tl.load(step).to(tl.float64)
    param, grad = _load(vector, gradient, offset, mask)
    if IS_DECOUPLED:
        param *= 1 - lr * decay
    else:
        grad += decay * param
    mean = tl.load(first + offset, mask=mask, other=0.0)
    mean += new1 * (grad - mean)
    square = beta2 * tl.load(second + offset, mask=mask, other=0.0) + new2 * grad * grad
    tl.store(first + offset, mean, mask=mask)
    tl.store(second + offset, square, mask=mask)
    # 1 - beta ** steps, in float64 since beta is close to 1.
    correction1 = (1 - tl.exp(steps * log_beta1)).to(tl.float32)
    correction2 = (1 - tl.exp(steps * log_beta2)).to(tl.float32)
    updated = param - lr / correction1 * mean / (tl.sqrt(square) / tl.sqrt(correction2) + epsilon)
    _store(vector, updated, free, value, offset, mask)


def make_kernel_step(
    optimizer: torch.optim.Optimizer, vector: Tensor, free: Tensor, value: Tensor
) -> Callable[[], None] | None:
    """Return a function that takes the optimizer's step on a vector, then sets it to `vector * free + value`.

    Return None if there is no kernel for this optimizer. It must have taken a step already, so that it has a state.
    """
    (group,) = optimizer.param_groups
    if any(group.get(option) for option in ("amsgrad", "maximize", "nesterov", "dampening")):
        return None
    kind = type(optimizer)
    if kind is torch.optim.SGD and group["momentum"]:
        return partial(_sgd_step, group, optimizer.state[vector], vector, free, value)
    if kind in (torch.optim.Adam, torch.optim.AdamW) and all(isinstance(b, float) and b for b in group["betas"]):
        is_decoupled = kind is torch.optim.AdamW or bool(group.get("decoupled_weight_decay"))
        return partial(_adam_step, group, optimizer.state[vector], is_decoupled, vector, free, value)
    return None


def _sgd_step(group: dict[str, Any], state: dict[str, Tensor], vector: Tensor, free: Tensor, value: Tensor) -> None:
    launch(
        _sgd, _grid(vector), vector, vector.grad, free, value, state["momentum_buffer"], group["lr"], vector.numel(),
        group["momentum"], group["weight_decay"], BLOCK,
    )  # fmt: skip


def _adam_step(
    group: dict[str, Any], state: dict[str, Tensor], is_decoupled: bool, vector: Tensor, free: Tensor, value: Tensor
) -> None:
    state["step"].add_(1)
    beta1, beta2 = group["betas"]
    launch(
        _adam, _grid(vector), vector, vector.grad, free, value, state["exp_avg"], state["exp_avg_sq"], state["step"],
        group["lr"], vector.numel(), 1 - beta1, beta2, 1 - beta2, math.log(beta1), math.log(beta2), group["eps"],
        group["weight_decay"], is_decoupled, BLOCK,
    )  # fmt: skip


def _grid(vector: Tensor) -> tuple[int]:
    return (triton.cdiv(vector.numel(), BLOCK),)
