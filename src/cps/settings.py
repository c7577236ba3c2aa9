"""Settings of training as plain, frozen data that a model file can hold.

An optimizer setting is a function from parameters to a `torch.optim.Optimizer`, and a schedule one from
progress to a factor on the learning rate, so any function of that form serves in their place. It is asked for
an epoch before the one before has ended, so it must depend on nothing but its arguments.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, is_dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import nn

from cps.losses import CrossEntropy, Loss
from cps.plain import setting

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Schedule = Callable[[float, int], float]


@setting
@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum; `weight_decay` is an L2 term of the gradient."""

    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer over these parameters."""
        return torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)


@setting
@dataclass(frozen=True)
class Adam:
    """Adam; `weight_decay` is an L2 term of the gradient, as in the paper's code."""

    lr: float = 1e-2
    weight_decay: float = 5e-4

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer over these parameters."""
        return torch.optim.Adam(parameters, lr=self.lr, weight_decay=self.weight_decay)


@setting
@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay."""

    lr: float = 1e-3
    weight_decay: float = 1e-2

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer over these parameters."""
        return torch.optim.AdamW(parameters, lr=self.lr, weight_decay=self.weight_decay)


@setting
@dataclass(frozen=True)
class Constant:
    """The learning rate stays as it is."""

    def __call__(self, epoch: float, epochs: int) -> float:
        """Return the factor on the learning rate at this (fractional) epoch."""
        return 1.0


@setting
@dataclass(frozen=True)
class Steps:
    """The learning rate is multiplied by `factor` at each of the epochs `at`."""

    at: tuple[int, ...]
    factor: float = 0.1

    def __call__(self, epoch: float, epochs: int) -> float:
        """Return the factor on the learning rate at this (fractional) epoch."""
        return self.factor ** sum(epoch >= drop for drop in self.at)


@setting
@dataclass(frozen=True)
class Cosine:
    """The learning rate falls to zero along half a cosine, after a linear rise over `warmup` epochs."""

    warmup: float = 0.0

    def __call__(self, epoch: float, epochs: int) -> float:
        """Return the factor on the learning rate at this (fractional) epoch."""
        if epoch < self.warmup:
            return (epoch + 1e-3) / self.warmup
        progress = (epoch - self.warmup) / max(epochs - self.warmup, 1e-9)
        return 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


@setting
@dataclass(frozen=True)
class Training:
    """How one phase trains: `epochs` passes in batches, with an optimizer, a schedule and a loss."""

    epochs: int
    optimizer: MakeOptimizer = field(default_factory=Adam)
    schedule: Schedule = field(default_factory=Constant)
    batch_size: int = 128
    loss: Loss = field(default_factory=CrossEntropy)

    def __post_init__(self) -> None:
        if not isinstance(self.epochs, int) or not isinstance(self.batch_size, int):
            raise TypeError(f"epochs and batch_size are ints, got {self.epochs!r} and {self.batch_size!r}")
        if self.epochs < 0:
            raise ValueError(f"epochs must not be negative, got {self.epochs}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        for name, value in (("optimizer", self.optimizer), ("schedule", self.schedule)):
            if not callable(value) or (isinstance(value, type) and is_dataclass(value)):
                example = "cps.SGD(0.1)" if name == "optimizer" else "cps.Cosine()"
                raise TypeError(f"{name} is an object such as {example}, or a function, got {value!r}")
        _check_loss(self.loss)


def _check_loss(loss: Any) -> None:
    """Refuse a loss of another form, such as one of torch's own."""
    try:
        signature(loss.forward if isinstance(loss, nn.Module) else loss).bind("features", "logits", "labels")
    except (TypeError, ValueError):
        raise TypeError(f"a loss is a function of features, logits and labels, got {loss!r}") from None
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise ValueError("the loss has parameters of its own, which nothing would train; give it fixed numbers")


def scaled(training: Training, scale: float) -> Training:
    """Return the same training with `scale` times the epochs, drops of the learning rate included."""
    schedule: Any = training.schedule
    if isinstance(schedule, Steps):
        schedule = Steps(tuple(max(1, round(drop * scale)) for drop in schedule.at), schedule.factor)
    if isinstance(schedule, Cosine):
        schedule = Cosine(schedule.warmup * scale)
    epochs = max(1, round(training.epochs * scale)) if training.epochs else 0
    return replace(training, epochs=epochs, schedule=schedule)
