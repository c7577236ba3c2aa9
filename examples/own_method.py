"""Write your own method on the frame, check it with `cps.check_method`, and compare it with others."""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

import cps
from cps.experiments.compare import Compare
from cps.experiments.comparison_tables import accuracy_table
from cps.experiments.contestants import CONTESTANTS, Setting, single_head
from cps.experiments.recipes import digits
from cps.methods.blocks.memory import Memory
from cps.methods.blocks.teacher import Teacher
from cps.methods.single_head import SingleHead
from cps.methods.task_training import TaskTraining
from cps.network.classifier import Classifier, Loss
from cps.training.objective import Objective, Trained

QUICK = "--quick" in sys.argv


@dataclass(eq=False)
class FeatureReplay(SingleHead):
    """Replay that also keeps the features of images in memory where the network had them before the task."""

    memory: Memory | None = Memory(2000)
    strength: float = 1.0

    has_teacher = True  # its bytes count while a task is learned
    name = "feature replay"

    def objective(self, task: TaskTraining) -> Trained:
        """Return what training minimises; for the first task, the cross-entropy."""
        if task.old == 0:
            return self.model
        return KeptFeatures(self.model, Teacher(self.model.backbone), task.old, self.strength)


class KeptFeatures(Objective):
    """The loss of all classes, plus the squared distance between new and old features of images of old classes."""

    def __init__(self, student: Classifier, teacher: Teacher, old: int, strength: float):
        super().__init__(student)
        self.student: Classifier
        self.teacher, self.old, self.strength = teacher, old, strength

    def forward(self, pixels: Tensor, labels: Tensor, loss: Loss) -> Tensor:
        """Return the loss of a batch; images in memory are those with old labels."""
        features, logits = self.student.outputs(pixels)
        total, is_old = loss(features, logits, labels), labels < self.old
        if is_old.any():
            total = total + self.strength * F.mse_loss(features[is_old], self.teacher(pixels[is_old]))
        return total


if __name__ == "__main__":
    train = cps.Training(1, cps.Adam(1e-2), batch_size=16)
    cps.check_method(lambda backbone: FeatureReplay(backbone, train=train, memory=Memory(21)))

    CONTESTANTS["feature-replay"] = single_head(FeatureReplay)  # a name on the command line, with its own settings
    recipe = digits().with_scaled_epochs(0.05 if QUICK else 1)
    setting = Setting(recipe, cps.make_fabric(), memory=Memory(100))
    with tempfile.TemporaryDirectory() as folder:
        methods = ["finetuning", "er", "feature-replay"]
        comparison = Compare(setting, methods, [1993], Path(folder), tasks=2 if QUICK else None).start()
    head, rows = accuracy_table(comparison)
    for row in (head, *rows):
        print("".join(f"{cell:<16}" for cell in row))
