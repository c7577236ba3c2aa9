"""SI: hold the weights whose moves have lowered the loss."""

from dataclasses import dataclass

import torch

from cps.methods.regularization.importance import flat_parameters
from cps.methods.regularization.quadratic_penalty import PathIntegral
from cps.methods.regularization.separate_heads import SeparateHeads
from cps.methods.task_training import TaskTraining
from cps.training.objective import Trained


@dataclass(eq=False)
class SynapticIntelligence(SeparateHeads):
    """Synaptic intelligence (Zenke et al., ICML 2017).

    The loss is that of the classes of the task plus `strength` times the sum over the parameters k of the backbone of
    Omega_k (theta_k - theta*_k)^2, where theta* are those after the last task. Every task adds
    omega_k / (d_k^2 + damping) to Omega_k: omega_k is by how much its steps have lowered the loss, and d_k how far they
    have moved the parameter. A negative omega_k counts as 0, since the penalty would reward moving.
    """

    strength: float = 0.1
    damping: float = 0.1

    positive = ("damping",)
    name = "SI"

    @property
    def copies_while_learning(self) -> int:
        """The copies of the parameters of the backbone: theta* and omega."""
        return 2

    def objective(self, task: TaskTraining) -> Trained:
        """Return the loss with the penalty."""
        return PathIntegral(self.model, self.first_class(task), self.strength, self.buffers.get("importance"))

    def train_task(self, task: TaskTraining) -> None:
        """Train, then add the importance of the task."""
        objective = self.objective(task)
        assert isinstance(objective, PathIntegral)
        task.fit(objective, self.with_exemplars(task.examples), self.train, guard=self.guard(task))
        moved = flat_parameters(self.model.backbone).detach() - objective.anchor
        added = objective.path.clamp(min=0) / (moved.square() + self.damping)
        self.buffers["importance"] = self.buffers.get("importance", torch.zeros_like(added)) + added
