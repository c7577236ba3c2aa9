"""LUCIR: a cosine head, features held near the old ones, and a margin between old classes and new ones."""

import math
from dataclasses import dataclass

from torch import Tensor

from cps.methods.blocks.teacher import Teacher
from cps.methods.cosine.cosine_method import Classify, CosineMethod, CosineObjective
from cps.methods.cosine.feature_distillation import angular_distance
from cps.methods.cosine.similarity_losses import margin_ranking_loss
from cps.methods.task_training import TaskTraining
from cps.network.classifier import Classifier, Loss
from cps.training.objective import Trained
from cps.training.settings import SGD, Steps, Training


@dataclass(eq=False)
class LUCIR(CosineMethod):
    """Learning a unified classifier incrementally via rebalancing (Hou et al., CVPR 2019).

    The loss is `CE(scale cos) + lambda (1 - cos(h, h')) + ranking_weight R`. h and h' are the features of model and
    teacher, and `lambda = feature_weight sqrt(old / new)` for the numbers of old and new classes. R is the margin
    ranking loss between the class of an old image and the `rivals` most similar new classes.
    """

    train: Training = Training(160, SGD(0.1, weight_decay=5e-4), Steps((80, 120), 0.1))
    feature_weight: float = 5.0
    ranking_weight: float = 1.0
    margin: float = 0.5
    rivals: int = 2

    name = "LUCIR"

    def objective(self, task: TaskTraining) -> Trained:
        """Return the three terms; for the first task, the cross-entropy."""
        if not task.old:
            return super().objective(task)
        return LUCIRObjective(self.model, Teacher(self.model.backbone), self.classification, self, task.old, task.new)


class LUCIRObjective(CosineObjective):
    """Cross-entropy, the angle between features and those of the teacher, and the margin ranking loss."""

    def __init__(self, student: Classifier, teacher: Teacher, classify: Classify, settings: LUCIR, old: int, new: int):
        super().__init__(student, classify)
        self.teacher, self.old = teacher, old
        self.feature_weight = settings.feature_weight * math.sqrt(old / new)
        self.ranking_weight, self.margin, self.rivals = settings.ranking_weight, settings.margin, settings.rivals

    def forward(self, pixels: Tensor, labels: Tensor, loss: Loss) -> Tensor:
        """Return the loss of a batch."""
        features = self.student.backbone(pixels)
        similarities = self.head.similarities(features)
        ranking = margin_ranking_loss(similarities, labels, self.old, margin=self.margin, rivals=self.rivals)
        distance = angular_distance(features, self.teacher(pixels))
        classified = self.classify(self.head, features, labels, loss)
        return classified + self.feature_weight * distance + self.ranking_weight * ranking
