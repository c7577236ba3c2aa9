"""EWC: hold the weights that the Fisher information calls important."""

from dataclasses import dataclass

import torch

from cps.methods.regularization.importance import exact_fisher, flat_parameters, image_batches
from cps.methods.regularization.quadratic_penalty import Penalized
from cps.methods.regularization.separate_heads import SeparateHeads
from cps.methods.task_training import TaskTraining
from cps.training.objective import Trained

IMAGES = 1020  # purpose of a seed


@dataclass(eq=False)
class EWC(SeparateHeads):
    """Elastic weight consolidation (Kirkpatrick et al., PNAS 2017).

    The loss is that of the classes of the task plus `strength` / 2 times the sum over earlier tasks t and parameters k
    of F_tk (theta_k - theta*_tk)^2. F_t is the exact Fisher information for `images` images of the task, and theta*_t
    are the parameters of the backbone after it. With `decay`, it is online EWC (Schwarz et al., ICML 2018): one term
    with the parameters after the last task, and F <- decay F + F_t.
    """

    strength: float = 5000.0
    images: int = 500
    decay: float | None = None

    positive = ("images",)
    name = "EWC"

    @property
    def copies_while_learning(self) -> int:
        """The copies of the parameters of the backbone: theta*, which separate terms keep anyway."""
        return 0 if self.decay is None else 1

    def objective(self, task: TaskTraining) -> Trained:
        """Return the loss with the penalty; for the first task, the loss alone."""
        if not self.buffers:
            return super().objective(task)
        importance, anchor = self.buffers.get("importance"), self.buffers.get("anchor")
        return Penalized(self.model, self.first_class(task), self.strength / 2, importance, anchor)

    def end_task(self, task: TaskTraining) -> None:
        """Add the Fisher information of the task.

        The terms of several tasks are kept as one with the same gradients: the sum of their Fisher information, and the
        mean of their parameters weighted by it.
        """
        model = self.model.eval()
        batches = image_batches(model, task.examples, self.images, self.prepare, task.generator(IMAGES))
        fisher, now = exact_fisher(model, batches, self.first_class(task)), flat_parameters(model.backbone).detach()
        earlier = self.buffers.get("importance", torch.zeros_like(fisher))
        if self.decay is not None:
            self.buffers["importance"] = self.decay * earlier + fisher
            return
        total = earlier + fisher
        moved = (self.buffers.get("anchor", now) - now) * (earlier / total.clamp(min=torch.finfo(total.dtype).tiny))
        self.buffers |= {"importance": total, "anchor": now + moved}
