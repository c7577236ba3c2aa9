"""Joint training: train once on all tasks together. The upper bound of continual learning."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from cps.data.examples import Data
from cps.data.images import as_images
from cps.data.tasks import Task
from cps.evaluation.metrics import Matrix
from cps.methods.single_head import Phase, SingleHeadTrainer


@dataclass(frozen=True)
class JointMetrics:
    """The accuracy of joint training in percent: the mean over tasks, and on each task as a matrix (1, tasks)."""

    ACC: float
    accuracy: Matrix


@dataclass(frozen=True)
class Joint:
    """Trains one classifier on the data of all tasks at once, which a continual learner is not allowed to do."""

    name: ClassVar[str] = "joint"
    trainer: SingleHeadTrainer

    def run(self, checkpoint: Path | None = None) -> JointMetrics:
        """Train on all tasks and return the accuracy on each; resume from the checkpoint if it exists."""
        tasks = self.trainer.tasks
        accuracy = self.trainer.train(self.name, [Phase(_concatenate(tasks), len(tasks))], checkpoint)
        return JointMetrics(float(accuracy[0].mean()), accuracy)


def _concatenate(tasks: Sequence[Task]) -> Data:
    """Return the training data of all tasks as one data set."""
    parts = [task.train for task in tasks]
    if all(isinstance(part, Subset) and part.dataset is parts[0].dataset for part in parts):
        return Subset(parts[0].dataset, [index for part in parts for index in part.indices])
    if isinstance(tasks[0].train, Dataset):
        return ConcatDataset([task.train for task in tasks])
    labels = [label for task in tasks for label in task.train[1]]
    return torch.cat([as_images(task.train[0]) for task in tasks]), labels
