"""LwF: new images teach old classes, too, by what the model said about them before."""

from dataclasses import dataclass

from torch import Tensor

from cps.methods.blocks.distillation import distillation_loss
from cps.methods.blocks.teacher import Teacher
from cps.methods.regularization.separate_heads import LossFrom, SeparateHeads
from cps.methods.task_training import TaskTraining
from cps.network.classifier import Classifier, Loss
from cps.network.freezing import Guard
from cps.training.objective import Trained


@dataclass(eq=False)
class LwF(SeparateHeads):
    """Learning without forgetting (Li & Hoiem, ECCV 2016).

    The loss is that of the classes of the task, plus `strength` times the distillation of all old classes by the model
    after the last task. The weights of old classes in the head are trained, unless `fixed_head`.
    """

    strength: float = 1.0
    temperature: float = 2.0
    fixed_head: bool = False

    has_teacher = True
    positive = ("temperature",)
    name = "LwF"

    def objective(self, task: TaskTraining) -> Trained:
        """Return the loss with distillation; for the first task, the loss alone."""
        if task.old == 0:
            return super().objective(task)
        teacher = Teacher(self.model)
        return DistilledOldClasses(
            self.model, teacher, self.first_class(task), task.old, self.strength, self.temperature
        )

    def guard(self, task: TaskTraining) -> Guard | None:
        """Return a guard of the weights of earlier classes if the head is fixed."""
        return super().guard(task) if self.fixed_head else None


class DistilledOldClasses(LossFrom):
    """The loss over the classes from `first` on, plus `strength` times the distillation of the `old` classes."""

    def __init__(
        self, student: Classifier, teacher: Teacher, first: int, old: int, strength: float, temperature: float
    ):
        super().__init__(student, first)
        self.teacher, self.old, self.strength, self.temperature = teacher, old, strength, temperature

    def forward(self, pixels: Tensor, labels: Tensor, loss: Loss) -> Tensor:
        """Return the loss of a batch."""
        features, logits = self.student.outputs(pixels)
        return self.with_distillation(features, logits, self.teacher(pixels), labels, loss)

    def with_distillation(
        self, features: Tensor, logits: Tensor, targets: Tensor, labels: Tensor, loss: Loss
    ) -> Tensor:
        """Return the loss for the outputs of the student and the logits of the teacher."""
        distilled = distillation_loss(logits[:, : self.old], targets[:, : self.old], self.temperature)
        return loss(features, logits[:, self.first :], labels - self.first) + self.strength * distilled
