"""Training steps: what anything that takes them must do, and as PyTorch takes them on any device."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from cps.data.batch_transform import BatchTransform
from cps.data.examples import Examples
from cps.network.classifier import Classifier
from cps.network.freezing import Guard, bind
from cps.network.partition import trainable
from cps.training.cuda.device_batches import EpochPlan
from cps.training.settings import Training

if TYPE_CHECKING:
    from lightning_fabric import Fabric


class TrainingSteps(Protocol):
    """Something that takes training steps on a classifier."""

    def begin(self, model: Classifier, guard: Guard, optimizer_state: dict[str, Any] | None) -> None:
        """Take up a classifier as it is now, with a fresh optimizer or a saved one."""
        ...

    def run(self, examples: Examples, plan: EpochPlan) -> Tensor:
        """Take a step on each batch of an epoch; return the sum of the losses."""
        ...

    def settle(self) -> None:
        """Bring the classifier up to date with what was learned."""
        ...

    def forget(self) -> None:
        """Keep no image."""
        ...

    def optimizer_state(self) -> dict[str, Any]:
        """Settle, and return the optimizer's state."""
        ...


class PlainSteps:
    """Steps as PyTorch takes them, on any device and in any number of processes."""

    def __init__(self, model: Classifier, training: Training, fabric: "Fabric", show: BatchTransform):
        self.fabric, self.show, self.loss = fabric, show, training.loss
        self.optimizer = training.optimizer(trainable(model).values())
        self.rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.total = torch.zeros((), dtype=torch.float32, device=fabric.device)

    def begin(self, model: Classifier, guard: Guard, optimizer_state: dict[str, Any] | None) -> None:
        """Take up a classifier as it is now, with a fresh optimizer or a saved one."""
        if optimizer_state is not None:
            self.optimizer.load_state_dict(optimizer_state)
        self.protect = bind(guard, dict(model.backbone.named_parameters()))
        self.wrapped, self.stepper = self.fabric.setup(model, self.optimizer)

    def run(self, examples: Examples, plan: EpochPlan) -> Tensor:
        """Take a step on each batch of an epoch; return the sum of the losses."""
        steps = zip(examples.batches(plan.order), plan.order, plan.factors, plan.shares, strict=True)
        self.total.zero_()
        for (images, labels), batch, factor, share in steps:
            for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = rate * factor
            moved = [value.to(self.fabric.device) for value in (images, labels, plan.uniform[batch])]
            self._step(moved, share, plan.pace * factor)
        return self.total

    def _step(self, shown: Sequence[Tensor], share: float, pace: float) -> None:
        pixels, labels = self.show(*shown)
        # As a method: lightning looks into the settings that a loss is, for tensors, and fails at frozen ones.
        loss = self.wrapped(pixels, labels, self.loss.__call__) * share
        self.fabric.backward(loss)
        self.stepper.step()
        self.protect(pace)
        self.stepper.zero_grad()
        self.total += loss.detach()

    def settle(self) -> None:
        """Nothing is left to do: the classifier itself has moved."""

    def forget(self) -> None:
        """Nothing is kept."""

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's state."""
        return self.optimizer.state_dict()
