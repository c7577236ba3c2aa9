"""Progress: what is told to whoever watches a learner."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """Where learning stands after an epoch: task and phase from 0 (phase 0 is dense, then one per round).

    `epoch` of the phase's epochs are done; `lengths` are the epochs of every phase.
    """

    task: int
    phase: int
    epoch: int
    lengths: tuple[int, ...]
    loss: float

    @property
    def epochs(self) -> int:
        """The epochs of this phase."""
        return self.lengths[self.phase]

    @property
    def done(self) -> int:
        """The epochs of the task that are done, over all phases."""
        return sum(self.lengths[: self.phase]) + self.epoch

    @property
    def total(self) -> int:
        """The epochs of the task, over all phases."""
        return sum(self.lengths)

    @property
    def words(self) -> str:
        """What is being done."""
        return "training" if self.phase == 0 else f"retraining, round {self.phase} of {len(self.lengths) - 1}"
