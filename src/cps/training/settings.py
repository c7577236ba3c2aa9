"""Training settings: frozen dataclasses that a model file can hold.

An optimizer setting is a function from parameters to a `torch.optim.Optimizer`. A schedule is a function from the
(fractional) epoch and the number of epochs to a factor on the learning rate. Any function of the same form can replace
them. A schedule must depend only on its arguments: it is called for an epoch before the previous epoch has ended.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from inspect import signature
from typing import Any, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from cps.network.classifier import Loss
from cps.storage.settings_codec import NumericSettings, setting
from cps.training.losses import CrossEntropy

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Schedule = Callable[[float, float], float]


class _OptimizerSettings(NumericSettings):
    """Settings of an optimizer; every float must be 0 or more."""

    def __post_init__(self) -> None:
        super().__post_init__()
        this: Any = self
        for entry in fields(this):
            if entry.type is float:
                self._require(entry.name, getattr(self, entry.name) >= 0, must="0 or more")


@setting
@dataclass(frozen=True)
class SGD(_OptimizerSettings):
    """Stochastic gradient descent with momentum; `weight_decay` is an L2 term in the gradient."""

    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return an optimizer of these parameters."""
        return torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)


@setting
@dataclass(frozen=True)
class Adam(_OptimizerSettings):
    """Adam; `weight_decay` is an L2 term in the gradient, as in the paper's code."""

    lr: float = 1e-2
    weight_decay: float = 5e-4

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return an optimizer of these parameters."""
        return torch.optim.Adam(parameters, lr=self.lr, weight_decay=self.weight_decay)


@setting
@dataclass(frozen=True)
class AdamW(_OptimizerSettings):
    """Adam with decoupled weight decay."""

    lr: float = 1e-3
    weight_decay: float = 1e-2

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return an optimizer of these parameters."""
        return torch.optim.AdamW(parameters, lr=self.lr, weight_decay=self.weight_decay)


@setting
@dataclass(frozen=True)
class RAdam(_OptimizerSettings):
    """Adam whose first steps are small because their statistics are uncertain (Liu et al., ICLR 2020)."""

    lr: float = 1e-2
    weight_decay: float = 0.0

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return an optimizer of these parameters."""
        return torch.optim.RAdam(parameters, lr=self.lr, weight_decay=self.weight_decay)


@setting
@dataclass(frozen=True)
class Constant:
    """A constant learning rate."""

    def __call__(self, epoch: float, epochs: float) -> float:
        """Return the factor on the learning rate at a (fractional) epoch."""
        return 1.0


@setting
@dataclass(frozen=True)
class Steps(NumericSettings):
    """The learning rate is multiplied by `factor` at each of the epochs `at`."""

    at: tuple[float, ...]
    factor: float = 0.1

    def __call__(self, epoch: float, epochs: float) -> float:
        """Return the factor on the learning rate at a (fractional) epoch."""
        return self.factor ** sum(epoch >= drop for drop in self.at)


@setting
@dataclass(frozen=True)
class Cosine(NumericSettings):
    """A cosine decay of the learning rate to zero, after a linear warm-up of `warmup` epochs."""

    warmup: float = 0.0

    def __call__(self, epoch: float, epochs: float) -> float:
        """Return the factor on the learning rate at a (fractional) epoch."""
        if epoch < self.warmup:
            return (epoch + 1e-3) / self.warmup
        progress = (epoch - self.warmup) / max(epochs - self.warmup, 1e-9)
        return 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


@setting
@dataclass(frozen=True)
class Training(NumericSettings):
    """How to train one phase: number of epochs, optimizer, learning rate schedule, batch size and loss."""

    epochs: int
    optimizer: MakeOptimizer = AdamW(3e-3)  # learns networks of many kinds: studies/default_training.py
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
    """Raise `TypeError` unless `value` is a function of these arguments; a settings class is not (its instance is)."""
    is_scheduler = _is_torch_scheduler(value)
    is_valid = callable(value) and not (isinstance(value, type) and is_dataclass(value)) and not is_scheduler
    if is_valid:
        with suppress(ValueError):  # functions written in C may have no signature
            is_valid = _accepts(value, *arguments)
    if not is_valid:
        expected = ", ".join(arguments)
        hint, got = "", repr(value)
        if is_scheduler:
            hint = "; a scheduler of torch belongs to one optimizer, and cps makes several"
        elif isinstance(value, torch.optim.Optimizer):
            hint = f"; pass how to make one: functools.partial(torch.optim.{type(value).__name__}, lr=...)"
            got = f"one of torch ({type(value).__name__})"  # its repr has many lines
        raise TypeError(f"{name} must be an object such as {example}, or a function of ({expected}), got {got}{hint}")


def _is_torch_scheduler(value: Any) -> bool:
    """Return True for a learning rate scheduler of torch, or for its class."""
    return issubclass(value if isinstance(value, type) else type(value), LRScheduler)


def _accepts(function: Callable[..., Any], *arguments: str) -> bool:
    try:
        signature(function).bind(*arguments)
    except TypeError:
        return False
    return True


def _check_loss(loss: Any) -> None:
    """Raise an error unless a loss is a function of (features, logits, labels); the losses of torch are not."""
    function = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        is_valid = _accepts(function, "features", "logits", "labels")
    except ValueError:
        is_valid = False
    is_of_torch = _module_of(loss).partition(".")[0] in ("torch", "torchvision")
    if not is_valid or is_of_torch:
        hint = "; for a loss of torch write: lambda features, logits, labels: F.cross_entropy(logits, labels)"
        raise TypeError(
            f"loss must be a function of (features, logits, labels), got {loss!r}{hint if is_of_torch else ''}"
        )
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise ValueError("loss must not have parameters, since nothing would train them; use fixed numbers instead")


def _module_of(function: Any) -> str:
    """Return the name of the module that a function, a partial of it, or the class of an object comes from."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__module__", None) or ""


def scale_epochs(training: Training, scale: float) -> Training:
    """Return the training with `scale` times the epochs, and the schedule stretched accordingly."""
    schedule: Any = training.schedule
    if isinstance(schedule, Steps):
        schedule = Steps(tuple(max(1, round(drop * scale)) for drop in schedule.at), schedule.factor)
    if isinstance(schedule, Cosine):
        schedule = Cosine(schedule.warmup * scale)
    epochs = max(1, round(training.epochs * scale)) if training.epochs else 0
    return replace(training, epochs=epochs, schedule=schedule)


def scale_like(training: Training, main: Training, further: Training) -> Training:
    """Return the training of a further phase that differs from `training` as `further` does from `main`.

    That is by the ratios of their epochs, learning rates and weight decays. The optimizers must be settings.
    """
    own, one, other = (cast(Any, each).optimizer for each in (training, main, further))
    rates = {name: getattr(own, name) * getattr(other, name) / getattr(one, name) for name in ("lr", "weight_decay")}
    return replace(scale_epochs(training, further.epochs / main.epochs), optimizer=replace(own, **rates))
