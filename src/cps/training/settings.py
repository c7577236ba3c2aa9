"""Settings of training as plain, frozen data that a model file can hold.

An optimizer setting is a function from parameters to a `torch.optim.Optimizer`, and a schedule one from
progress to a factor on the learning rate, so any function of that form serves in their place. It is asked for
an epoch before the one before has ended, so it must depend on nothing but its arguments.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import nn

from cps.network.classifier import Loss
from cps.storage.settings_codec import NumericSettings, setting
from cps.training.losses import CrossEntropy

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Schedule = Callable[[float, int], float]


class _Rates(NumericSettings):
    """Settings of an optimizer, none of them negative."""

    def __post_init__(self) -> None:
        super().__post_init__()
        this: Any = self
        for rate in fields(this):
            if rate.type is float:
                self._require(rate.name, getattr(self, rate.name) >= 0, must="0 or more")


@setting
@dataclass(frozen=True)
class SGD(_Rates):
    """Stochastic gradient descent with momentum; `weight_decay` is an L2 term of the gradient."""

    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer over these parameters."""
        return torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)


@setting
@dataclass(frozen=True)
class Adam(_Rates):
    """Adam; `weight_decay` is an L2 term of the gradient, as in the paper's code."""

    lr: float = 1e-2
    weight_decay: float = 5e-4

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer over these parameters."""
        return torch.optim.Adam(parameters, lr=self.lr, weight_decay=self.weight_decay)


@setting
@dataclass(frozen=True)
class AdamW(_Rates):
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
class Steps(NumericSettings):
    """The learning rate is multiplied by `factor` at each of the epochs `at`."""

    at: tuple[float, ...]
    factor: float = 0.1

    def __call__(self, epoch: float, epochs: int) -> float:
        """Return the factor on the learning rate at this (fractional) epoch."""
        return self.factor ** sum(epoch >= drop for drop in self.at)


@setting
@dataclass(frozen=True)
class Cosine(NumericSettings):
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
class Training(NumericSettings):
    """How one phase trains: `epochs` passes in batches, with an optimizer, a schedule and a loss."""

    epochs: int
    optimizer: MakeOptimizer = field(default_factory=Adam)
    schedule: Schedule = field(default_factory=Constant)
    batch_size: int = 128
    loss: Loss = field(default_factory=CrossEntropy)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs < 0:
            raise ValueError(f"epochs must not be negative, got {self.epochs}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        _check_function("optimizer", self.optimizer, "cps.SGD(0.1)", "parameters")
        _check_function("schedule", self.schedule, "cps.Cosine()", "epoch", "epochs")
        _check_loss(self.loss)


def _check_function(name: str, value: Any, example: str, *arguments: str) -> None:
    """Refuse what is no function of so many arguments, such as a class instead of one of its objects."""
    is_right = callable(value) and not (isinstance(value, type) and is_dataclass(value))
    if is_right:
        with suppress(ValueError):  # what is written in C may not tell
            is_right = _takes(value, *arguments)
    if not is_right:
        takes = ", ".join(arguments)
        raise TypeError(f"{name} is an object such as {example}, or a function of ({takes}), got {value!r}")


def _takes(function: Callable[..., Any], *arguments: str) -> bool:
    try:
        signature(function).bind(*arguments)
    except TypeError:
        return False
    return True


def _check_loss(loss: Any) -> None:
    """Refuse a loss of another form, such as one of torch's own."""
    function = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        is_right = _takes(function, "features", "logits", "labels")
    except ValueError:
        is_right = False
    if not is_right:
        raise TypeError(f"a loss is a function of features, logits and labels, got {loss!r}")
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
