"""Progress reports count epochs over all phases of a task."""

import re

import cps
from cps.training.progress import Progress
from samples import make_task


def test_progress_counts_the_epochs_of_a_phase_and_of_the_task():
    first, last = Progress(0, 0, 2, (5, 3, 3), 0.5), Progress(0, 2, 3, (5, 3, 3), 0.1)
    assert (first.epochs, first.done, first.total, first.phase_name) == (5, 2, 11, "training")
    assert (last.epochs, last.done, last.total, last.phase_name) == (3, 11, 11, "retraining, round 2 of 2")


def test_show_prints_one_line_an_epoch(make_learner, capsys):
    make_learner(on_epoch=cps.show).learn(make_task(0))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert re.fullmatch(r"task 0, training: epoch 1 of 2, loss \d+\.\d{4}", lines[0])
    assert re.fullmatch(r"task 0, retraining, round 1 of 1: epoch 2 of 2, loss \d+\.\d{4}", lines[-1])
