"""Finetuning: train on one task after the other and forget. The lower bound of continual learning."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from cps.evaluation.metrics import Metrics
from cps.methods.single_head import Phase, SingleHeadTrainer


@dataclass(frozen=True)
class Finetuning:
    """Trains one classifier on each task in turn, without protecting earlier tasks."""

    name: ClassVar[str] = "finetuning"
    trainer: SingleHeadTrainer

    def run(self, checkpoint: Path | None = None) -> Metrics:
        """Train on all tasks and return the class-incremental metrics; resume from the checkpoint if it exists."""
        phases = [Phase(task.train, index + 1) for index, task in enumerate(self.trainer.tasks)]
        return Metrics.of(self.trainer.train(self.name, phases, checkpoint))
