"""Progress reports for the `on_epoch` callback of a learner."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """The state of learning after an epoch.

    `task` and `phase` count from 0. Phase 0 is dense training, and one phase follows each pruning round. `epoch` is
    the number of finished epochs of this phase, and `lengths` has the number of epochs of each phase.
    """

    task: int
    phase: int
    epoch: int
    lengths: tuple[int, ...]
    loss: float

    @property
    def epochs(self) -> int:
        """The number of epochs of this phase."""
        return self.lengths[self.phase]

    @property
    def done(self) -> int:
        """The number of finished epochs of the task, over all phases."""
        return sum(self.lengths[: self.phase]) + self.epoch

    @property
    def total(self) -> int:
        """The number of epochs of the task, over all phases."""
        return sum(self.lengths)

    @property
    def phase_name(self) -> str:
        """The name of this phase: "training" or "retraining, round 1 of 3"."""
        return "training" if self.phase == 0 else f"retraining, round {self.phase} of {len(self.lengths) - 1}"


def show(progress: Progress) -> None:
    """Print one line about an epoch: a callback for `on_epoch`."""
    epoch = f"epoch {progress.epoch} of {progress.epochs}"
    print(f"task {progress.task}, {progress.phase_name}: {epoch}, loss {progress.loss:.4f}", flush=True)
