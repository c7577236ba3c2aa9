"""Finetuning with a softmax for each task, as methods without a memory are published."""

from dataclasses import dataclass

from torch import Tensor

from cps.methods.blocks.heads import guard_rows
from cps.methods.regularization.importance import flat_parameters
from cps.methods.single_head import SingleHead
from cps.methods.task_training import TaskTraining
from cps.network.classifier import Classifier, Loss
from cps.network.freezing import Guard
from cps.selection.base import Selector
from cps.selection.max_output import MaxOutput
from cps.training.objective import Objective, Trained


@dataclass(eq=False)
class SeparateHeads(SingleHead):
    """The loss of a task is over its own classes alone, and the weights of earlier classes in the head stay.

    Scores of different tasks have never competed, so what tells most is the accuracy with the task known. With a memory
    there is one loss over all classes instead, and all weights of the head are trained.
    """

    name = "finetuning of separate heads"

    @property
    def copies_while_learning(self) -> int:
        """How many copies of the parameters of the backbone are held while a task is learned, but not between tasks."""
        return 0

    @property
    def group_selector(self) -> Selector:
        """The selector for groups of images: heads that were trained apart have no common softmax."""
        return MaxOutput() if self.memory is None else super().group_selector

    def first_class(self, task: TaskTraining) -> int:
        """Return the first of the classes that the loss is about."""
        return 0 if len(self.exemplars) else task.old

    def objective(self, task: TaskTraining) -> Trained:
        """Return the loss over the classes of the task."""
        first = self.first_class(task)
        return LossFrom(self.model, first) if first else self.model

    def guard(self, task: TaskTraining) -> Guard | None:
        """Return a guard of the weights of earlier classes in the head."""
        first = self.first_class(task)
        return guard_rows(self.model.head, first) if first else None

    def kept(self, *, learning: bool = False) -> dict[str, int]:
        """Return the bytes kept between tasks, or while a task is learned, by what they are."""
        sizes = super().kept(learning=learning)
        if learning and self.copies_while_learning:
            sizes["copies"] = self.copies_while_learning * flat_parameters(self.model.backbone).nbytes
        return sizes


class LossFrom(Objective):
    """The loss over the classes from `first` on."""

    def __init__(self, student: Classifier, first: int):
        super().__init__(student)
        self.student: Classifier
        self.first = first

    def forward(self, pixels: Tensor, labels: Tensor, loss: Loss) -> Tensor:
        """Return the loss of a batch."""
        features, logits = self.student.outputs(pixels)
        return loss(features, logits[:, self.first :], labels - self.first)
