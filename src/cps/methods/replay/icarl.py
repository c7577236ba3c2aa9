"""iCaRL: sigmoid outputs whose old ones are distilled, and classification by the nearest mean of exemplars."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cps.data.augmentation import Flip
from cps.method import Assumptions
from cps.methods.blocks.heads import nearest_mean_scores
from cps.methods.blocks.memory import Memory
from cps.methods.blocks.teacher import Teacher
from cps.methods.single_head import SingleHead
from cps.methods.task_training import TaskTraining
from cps.network.classifier import Classifier, Loss
from cps.selection.base import Selector
from cps.selection.max_output import MaxOutput
from cps.storage.settings_codec import contains_setting
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

    has_teacher = True
    name = "iCaRL"
    assumes = Assumptions(replay=True)

    @property
    def group_selector(self) -> Selector:
        """The selector for groups of images; distances are no logits, so they have no softmax."""
        return MaxOutput()

    def objective(self, task: TaskTraining) -> Trained:
        """Return the binary cross-entropy with the teacher's targets."""
        return DistilledSigmoids(self.model, Teacher(self.model) if task.old else None, task.old)

    def end_task(self, task: TaskTraining) -> None:
        """Compute the mean of the exemplars of every class, since all features have moved."""
        self.buffers["means"] = exemplar_means(self)

    def scores(self, features: Tensor) -> Tensor:
        """Return minus the squared distances to the means of the classes."""
        return nearest_mean_scores(features, self.buffers["means"])


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


def exemplar_means(method: SingleHead) -> Tensor:
    """Return the mean features (classes, d) of the exemplars of each class, features and means of unit length."""
    examples = method.exemplars.examples()
    if examples is None:
        raise ValueError(f"{method.name} classifies by its exemplars, so its memory must hold one of each class")
    views = (False, True) if contains_setting(method.augment, Flip) else (False,)
    labels = examples.targets.to(method.device)
    means = torch.zeros(method.num_classes, method.num_features, device=method.device)
    for flipped in views:
        means.index_add_(0, labels, F.normalize(method.features_of(examples, flipped=flipped), dim=1))
    return F.normalize(means, dim=1)
