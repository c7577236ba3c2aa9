"""iCaRL: sigmoid outputs whose old ones are distilled, and classification by the nearest mean of exemplars."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from cps.method import Assumptions
from cps.methods.blocks.memory import Memory
from cps.methods.blocks.teacher import Teacher
from cps.methods.single_head import SingleHead
from cps.methods.task_training import TaskTraining
from cps.network.classifier import Classifier, Loss
from cps.training.objective import Objective, Trained
from cps.training.settings import SGD, Steps, Training


@dataclass(eq=False)
class ICaRL(SingleHead):
    """Incremental classifier and representation learning (Rebuffi et al., CVPR 2017).

    A binary cross-entropy for every class; the targets of old classes are the sigmoid outputs of the teacher, also for
    images in memory. An image gets the class whose exemplars have the nearest mean, among them their mirror images if
    the augmentation has flips.
    """

    train: Training = Training(70, SGD(2.0, weight_decay=1e-5), Steps((49, 63), 0.2))
    memory: Memory | None = Memory(2000)
    nearest_mean: bool = True

    has_teacher = True
    name = "iCaRL"
    assumes = Assumptions(replay=True)

    def objective(self, task: TaskTraining) -> Trained:
        """Return the binary cross-entropy with the teacher's targets."""
        return DistilledSigmoids(self.model, Teacher(self.model) if task.old else None, task.old)


class DistilledSigmoids(Objective):
    """The mean binary cross-entropy over images and classes, with the teacher's sigmoids for the old classes."""

    def __init__(self, student: Classifier, teacher: Teacher | None, old: int):
        super().__init__(student)
        self.student: Classifier
        self.teacher, self.old = teacher, old

    def forward(self, pixels: Tensor, labels: Tensor, loss: Loss) -> Tensor:
        """Return the loss of a batch; that of the training settings is not used."""
        logits = self.student(pixels).float()
        targets = F.one_hot(labels, logits.shape[1]).to(logits.dtype)
        if self.teacher is not None:
            targets[:, : self.old] = self.teacher(pixels)[:, : self.old].sigmoid()
        return F.binary_cross_entropy_with_logits(logits, targets)
