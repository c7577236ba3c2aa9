"""MAS: hold the weights that the outputs are sensitive to."""

from dataclasses import dataclass

import torch

from cps.methods.regularization.importance import image_batches, output_sensitivity
from cps.methods.regularization.quadratic_penalty import Penalized
from cps.methods.regularization.separate_heads import SeparateHeads
from cps.methods.task_training import TaskTraining
from cps.training.objective import Trained

IMAGES = 1020  # purpose of a seed


@dataclass(eq=False)
class MAS(SeparateHeads):
    """Memory aware synapses (Aljundi et al., ECCV 2018).

    The loss is that of the classes of the task plus `strength` / 2 times the sum over the parameters k of the backbone
    of Omega_k (theta_k - theta*_k)^2, where theta* are those after the last task. Every task adds the mean over
    `images` of its images of |d |F(x)|^2 / d theta_k| to Omega_k; F(x) are the logits of all classes so far.
    """

    strength: float = 1.0
    images: int = 500

    positive = ("images",)
    name = "MAS"

    @property
    def copies_while_learning(self) -> int:
        """The copies of the parameters of the backbone: theta*."""
        return 1

    def objective(self, task: TaskTraining) -> Trained:
        """Return the loss with the penalty; for the first task, the loss alone."""
        if not self.buffers:
            return super().objective(task)
        return Penalized(self.model, self.first_class(task), self.strength / 2, self.buffers.get("importance"))

    def end_task(self, task: TaskTraining) -> None:
        """Add the sensitivity of the outputs for images of the task."""
        model = self.model.eval()
        batches = image_batches(model, task.examples, self.images, self.prepare, task.generator(IMAGES))
        added = output_sensitivity(model, batches)
        self.buffers["importance"] = self.buffers.get("importance", torch.zeros_like(added)) + added
