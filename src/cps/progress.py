"""Progress: what is told to whoever watches a learner."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """Where learning stands after an epoch: task and phase from 0 (phase 0 is dense, then one per round)."""

    task: int
    phase: int
    phases: int
    epoch: int
    epochs: int
    loss: float
