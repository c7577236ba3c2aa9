"""Joint training: train once on all tasks together. The upper bound of continual learning."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cps.data.tasks import Task
from cps.methods.single_head import SingleHead
from cps.methods.task_training import PhaseProgress


@dataclass(eq=False)
class Joint(SingleHead):
    """One training on the images of all tasks at once, which a continual learner is not allowed."""

    name = "joint training"

    def learn(self, task: Task, **options: Any) -> None:
        """Raise `TypeError`: tasks are learned by `learn_all`, all at once."""
        raise TypeError("joint training learns all tasks at once; call learn_all(tasks)")

    def learn_all(
        self,
        tasks: Sequence[Task],
        *,
        checkpoint: str | Path | None = None,
        on_epoch: Callable[[PhaseProgress], None] | None = None,
    ) -> None:
        """Learn all tasks; the options are those of `SingleHead.learn`."""
        self._learn(tasks, checkpoint, on_epoch)
