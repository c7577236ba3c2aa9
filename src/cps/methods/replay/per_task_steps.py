"""Training steps to the mean of where each task alone would take a network."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cps.network.freezing import Guard
from cps.training.objective import Trained
from cps.training.steps import Fit, PlainSteps

if TYPE_CHECKING:
    from lightning_fabric import Fabric


class Snapshot(NamedTuple):
    """Copies of what a training step changes: parameters, running statistics, and the state of the optimizer."""

    parameters: list[Tensor]
    statistics: list[Tensor]
    optimizer: dict[Any, dict[str, Any]]


class PerTaskSteps(PlainSteps):
    """Steps that train on the images of each task in a batch apart.

    From the same parameters P, `inner_steps` steps of the optimizer on the images of task i lead to P_i. Then
    `P <- rate mean_i P_i + (1 - rate) P`. Running statistics and the state of the optimizer start from the same values
    for each task, too, and become their mean. With `in_sequence` there is no way back: one task is trained after the
    other, and `P <- rate P_last + (1 - rate) P`.

    A task with a single image in a batch is left out, since batch norm needs two.
    """

    def __init__(
        self, fit: Fit, fabric: "Fabric", task_of_class: Tensor, rate: float, *, inner_steps: int, in_sequence: bool
    ):
        super().__init__(fit.model, fit.training, fabric, fit.transform)
        self.task_of_class, self.rate = task_of_class.to(fabric.device), rate
        self.inner_steps, self.in_sequence = inner_steps, in_sequence

    def begin(self, model: Trained, guard: Guard, optimizer_state: dict[str, Any] | None) -> None:
        """Start from the present weights, in the memory layout that training gives them."""
        super().begin(model, guard, optimizer_state)
        self.parameters = [parameter.detach() for parameter in model.parameters() if parameter.requires_grad]
        self.statistics = [buffer for buffer in model.buffers() if buffer.is_floating_point()]

    def _step(self, batch: Sequence[Tensor], loss_weight: float, score_step: float) -> None:
        pixels, labels = self.transform(*batch)
        tasks = self.task_of_class[labels]
        present, sizes = tasks.unique(return_counts=True)
        present = present[sizes > 1]
        start, total = self._snapshot(), None
        for task in present:
            if total is not None and not self.in_sequence:
                self._set(start)
            own = tasks == task
            self._train(pixels[own], labels[own], len(present))
            total = self._snapshot() if total is None else _add(total, self._snapshot())
        if total is None:
            return
        if not self.in_sequence:
            self._set(total, divided_by=len(present))
        for live, before in zip(self.parameters, start.parameters, strict=True):
            live.copy_(torch.lerp(before, live, self.rate))
        self.restore(score_step)

    def _train(self, pixels: Tensor, labels: Tensor, tasks: int) -> None:
        """Take the inner steps for one of the tasks in a batch."""
        for step in range(self.inner_steps):
            with self.fabric.autocast():
                loss = self.forward(pixels, labels, self.loss.__call__)
            self.fabric.backward(loss)
            self.fabric_optimizer.step()
            self.fabric_optimizer.zero_grad()
            if step == 0:
                self.total_loss += loss.detach() / tasks

    def _snapshot(self) -> Snapshot:
        """Return a copy of the present values."""
        parameters, statistics = ([value.clone() for value in values] for values in (self.parameters, self.statistics))
        return Snapshot(parameters, statistics, {key: _copy(state) for key, state in self.optimizer.state.items()})

    def _set(self, values: Snapshot, *, divided_by: int = 1) -> None:
        """Set all values, divided by a number."""
        for live, value in zip(
            [*self.parameters, *self.statistics], [*values.parameters, *values.statistics], strict=True
        ):
            live.copy_(value / divided_by)
        self.optimizer.state.clear()
        for parameter, state in values.optimizer.items():
            self.optimizer.state[parameter] = {
                name: value / divided_by if isinstance(value, Tensor) else value for name, value in state.items()
            }


def _copy(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}


def _add(total: Snapshot, other: Snapshot) -> Snapshot:
    """Add another snapshot to a sum of snapshots; return it."""
    for key, state in total.optimizer.items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                value.add_(other.optimizer[key][name])
    for value, more in zip([*total.parameters, *total.statistics], [*other.parameters, *other.statistics], strict=True):
        value.add_(more)
    return total
