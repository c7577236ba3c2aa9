"""Progress reports count epochs over all phases of a task."""

from cps.training.progress import Progress


def test_progress_counts_the_epochs_of_a_phase_and_of_the_task():
    first, last = Progress(0, 0, 2, (5, 3, 3), 0.5), Progress(0, 2, 3, (5, 3, 3), 0.1)
    assert (first.epochs, first.done, first.total, first.phase_name) == (5, 2, 11, "training")
    assert (last.epochs, last.done, last.total, last.phase_name) == (3, 11, 11, "retraining, round 2 of 2")
