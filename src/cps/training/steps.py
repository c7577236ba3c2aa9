"""Training steps: the protocol, and the plain implementation for any device."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from cps.data.batch_transform import BatchTransform
from cps.data.examples import Examples
from cps.network.freezing import Guard, make_restore
from cps.network.partition import as_channels_last, trainable
from cps.runtime.devices import precision_of
from cps.training.cpu import speed_up
from cps.training.objective import Objective, Trained, guarded_parameters
from cps.training.settings import Training

if TYPE_CHECKING:
    from lightning_fabric import Fabric

UNCONVERTED = ("32-true", "bf16-mixed")  # precisions whose input needs no conversion outside autocast


@dataclass(frozen=True)
class EpochPlan:
    """One epoch of one process: the example indices of each batch, and the numbers that go with them.

    `uniform` has a row of random numbers for each example. `factors` has the factor on the learning rate of each step,
    and `loss_weights` the weight of this process's part of each batch. `score_step` is the step size of the mask scores
    at the full learning rate, and `images` the number of images of all processes.
    """

    order: Sequence[Tensor]
    uniform: Tensor
    factors: Sequence[float]
    loss_weights: Sequence[float]
    score_step: float = 0.0
    images: int = 0


@dataclass(frozen=True, eq=False)
class Fit:
    """What one call of `Trainer.fit` trains. `total_epochs` are the epochs of all phases of the task."""

    model: Trained
    examples: Examples
    training: Training
    transform: BatchTransform
    guard: Guard
    total_epochs: int


class TrainingSteps(Protocol):
    """Takes training steps on a classifier or an objective."""

    def begin(self, model: Trained, guard: Guard, optimizer_state: dict[str, Any] | None) -> None:
        """Start from the present weights of a model, with a new optimizer or a saved optimizer state."""
        ...

    def run(self, examples: Examples, plan: EpochPlan) -> Tensor:
        """Take one step per batch of an epoch; return the sum of the losses."""
        ...

    def write_back(self) -> None:
        """Copy the trained values into the classifier and its guard."""
        ...

    def release(self) -> None:
        """Erase all images."""
        ...

    def optimizer_state(self) -> dict[str, Any]:
        """Write back, and return the state of the optimizer."""
        ...


MakeSteps = Callable[[Fit, "Fabric"], TrainingSteps]


@dataclass
class StepCache:
    """The steps of the last fit, None if there are none; `key` is what another fit must have in common to use them."""

    key: Any = None
    steps: TrainingSteps | None = None

    def clear(self) -> None:
        """Release the steps."""
        self.key = self.steps = None


class PlainSteps:
    """Training steps in plain PyTorch, on any device and in any number of processes."""

    def __init__(self, model: Trained, training: Training, fabric: "Fabric", transform: BatchTransform):
        self.fabric, self.transform, self.loss = fabric, transform, training.loss
        self.optimizer = (
            model.make_optimizer(training)
            if isinstance(model, Objective)
            else training.optimizer(trainable(model).values())
        )
        self._undo: ExitStack | None = None
        self.rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.total_loss = torch.zeros((), dtype=torch.float32, device=fabric.device)

    def begin(self, model: Trained, guard: Guard, optimizer_state: dict[str, Any] | None) -> None:
        """Start from the present weights of a model, with a new optimizer or a saved optimizer state."""
        if optimizer_state is not None:
            self.optimizer.load_state_dict(optimizer_state)
        if self.fabric.device.type == "cpu":
            self._undo = speed_up(model, self.optimizer)
        self.restore = make_restore(guard, guarded_parameters(model))
        self.objective = model if isinstance(model, Objective) else None
        fabric_model, self.fabric_optimizer = self.fabric.setup(model, self.optimizer)
        # Lightning's wrapper searches all arguments for tensors to convert, which autocast does where it is needed.
        is_converted = self.fabric.world_size > 1 or precision_of(self.fabric) not in UNCONVERTED
        self.forward = fabric_model if is_converted else model

    def run(self, examples: Examples, plan: EpochPlan) -> Tensor:
        """Take one step per batch of an epoch; return the sum of the losses."""
        steps = zip(examples.batches(plan.order), plan.order, plan.factors, plan.loss_weights, strict=True)
        self.total_loss.zero_()
        for (images, labels), indices, factor, loss_weight in steps:
            for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = rate * factor
            batch = [value.to(self.fabric.device) for value in (images, labels, plan.uniform[indices])]
            self._step(batch, loss_weight, plan.score_step * factor)
        return self.total_loss

    def _step(self, batch: Sequence[Tensor], loss_weight: float, score_step: float) -> None:
        pixels, labels = self.transform(*batch)
        if self._undo is not None:
            pixels = as_channels_last(pixels)
        with self.fabric.autocast():
            # `__call__`, since lightning searches dataclass arguments for tensors and fails on frozen ones, as losses.
            loss = self.forward(pixels, labels, self.loss.__call__) * loss_weight
        self.fabric.backward(loss)
        if self.objective is not None:
            self.fabric.strategy.precision.unscale_gradients(self.optimizer)  # scaled in 16-bit precision
            self.objective.before_step()
        self.fabric_optimizer.step()
        self.restore(score_step)
        if self.objective is not None:
            self.objective.after_step()
        self.fabric_optimizer.zero_grad()
        self.total_loss += loss.detach()

    def write_back(self) -> None:
        """Do nothing: the classifier itself is trained."""

    def release(self) -> None:
        """Undo what made the model faster; no image is kept."""
        if self._undo is not None:
            self._undo.close()

    def optimizer_state(self) -> dict[str, Any]:
        """Return the state of the optimizer."""
        return self.optimizer.state_dict()
