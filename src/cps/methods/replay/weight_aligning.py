"""Weight aligning: distil, then give the weights of new classes the mean length of those of old ones."""

from dataclasses import dataclass

from torch import Tensor

from cps.method import Assumptions
from cps.methods.blocks.distillation import distillation_loss
from cps.methods.blocks.heads import align_weights
from cps.methods.blocks.memory import Memory
from cps.methods.blocks.teacher import Teacher
from cps.methods.single_head import SingleHead
from cps.methods.task_training import TaskTraining
from cps.network.classifier import Classifier, Loss
from cps.training.objective import Objective, Trained


@dataclass(eq=False)
class WeightAligning(SingleHead):
    """Maintaining discrimination and fairness in class incremental learning (Zhao et al., CVPR 2020).

    The loss is `(1 - share)` times the cross-entropy plus `share` times the distillation of old classes, where `share`
    is that of the old classes among all. After training, the weights of the new classes are scaled.
    """

    memory: Memory | None = Memory(2000)
    temperature: float = 2.0

    has_teacher = True
    name = "WA"
    assumes = Assumptions(replay=True)

    def objective(self, task: TaskTraining) -> Trained:
        """Return the weighted sum of cross-entropy and distillation; for the first task, the cross-entropy."""
        if task.old == 0:
            return self.model
        share = task.old / (task.old + task.new)
        return DistilledLoss(self.model, Teacher(self.model), task.old, share, self.temperature)

    def train_task(self, task: TaskTraining) -> None:
        """Train, then align the weights of the head."""
        super().train_task(task)
        if task.old:
            align_weights(self.model.head, task.old)


class DistilledLoss(Objective):
    """`(1 - share)` times the loss over all classes, plus `share` times the distillation of the old ones."""

    def __init__(self, student: Classifier, teacher: Teacher, old: int, share: float, temperature: float):
        super().__init__(student)
        self.student: Classifier
        self.teacher, self.old, self.share, self.temperature = teacher, old, share, temperature

    def forward(self, pixels: Tensor, labels: Tensor, loss: Loss) -> Tensor:
        """Return the loss of a batch."""
        features, logits = self.student.outputs(pixels)
        targets = self.teacher(pixels)[:, : self.old]
        distilled = distillation_loss(logits[:, : self.old], targets, self.temperature)
        return (1 - self.share) * loss(features, logits, labels) + self.share * distilled
