"""Losses and accuracies reach the loggers of other libraries."""

import csv
import logging
import sys
from pathlib import Path

import pytest
import torch
from lightning_fabric.loggers import CSVLogger

import cps
from commands import CPU, run_cps
from cps.evaluation.tracker import open_tracker
from samples import make_task


class Run:
    """Takes metrics as a run of wandb does."""

    def __init__(self):
        self.rows = []

    def log(self, metrics):
        self.rows.append(metrics)


class Writer:
    """Takes metrics as a `SummaryWriter` does."""

    def __init__(self):
        self.rows = []

    def add_scalar(self, name, value, step):
        self.rows.append((name, value, step))

    def flush(self):
        self.rows.append("flushed")


@pytest.fixture(scope="module")
def learned_tasks(fabric):
    """Return two learned tasks, their learner, and the `Progress` after each epoch."""
    torch.manual_seed(0)
    progress, tasks = [], [make_task(0), make_task(10)]
    training = cps.Training(3, cps.Adam(1e-2), batch_size=16)
    learner = cps.Learner(
        cps.SmallConvNet(2, (8, 12)), rounds=2, train=training, retrain=cps.Training(2), selectors=(cps.MaxOutput(),),
        fabric=fabric, on_epoch=progress.append,
    )  # fmt: skip
    for task in tasks:
        learner.learn(task)
    return learner, tasks, progress


def test_losses_have_the_number_of_epochs_of_all_tasks_as_their_step(learned_tasks):
    _, _, progress = learned_tasks
    run, writer = Run(), Writer()
    for at in progress:
        cps.Tracker(run)(at)
        cps.Tracker(writer)(at)
    assert [row["epoch"] for row in run.rows] == list(range(1, 15))
    names = ["loss/training"] * 3 + ["loss/retraining"] * 4
    assert [
        (name, at.loss, step) for step, (name, at) in enumerate(zip(names * 2, progress, strict=True), 1)
    ] == writer.rows
    assert run.rows[0] == {"loss/training": progress[0].loss, "epoch": 1}


def test_accuracies_are_logged_after_each_task_by_selector_and_group_size(learned_tasks):
    learner, tasks, _ = learned_tasks
    evaluation = cps.evaluate(learner, tasks, group_sizes=[1, 4])
    run, writer = Run(), Writer()
    cps.Tracker(run).log_evaluation(evaluation)
    cps.Tracker(writer).log_evaluation(evaluation)
    assert [row.pop("task") for row in run.rows] == [1, 2]
    assert set(run.rows[0]) == {"accuracy/task known", "accuracy/MaxOutput/1", "accuracy/MaxOutput/4"}
    assert run.rows[1]["accuracy/MaxOutput/1"] == evaluation.class_il["MaxOutput"][1].ACC
    assert run.rows[0]["accuracy/MaxOutput/1"] == evaluation.class_il["MaxOutput"][1].accuracy[0, 0]
    assert ("accuracy/task known", evaluation.task_il.ACC, 2) in writer.rows
    assert writer.rows[-1] == "flushed"


def read_csv(folder):
    (path,) = Path(folder).rglob("metrics.csv")
    return list(csv.DictReader(path.read_text().splitlines()))


def test_a_logger_of_lightning_gets_everything(learned_tasks, tmp_path):
    learner, tasks, progress = learned_tasks
    tracker = cps.Tracker(CSVLogger(tmp_path))
    for at in progress:
        tracker(at)
    tracker.log_evaluation(cps.evaluate(learner, tasks, group_sizes=[1]))
    rows = read_csv(tmp_path)
    assert [float(row["loss/training"]) for row in rows if row["loss/training"]] == pytest.approx(
        [at.loss for at in progress if at.phase == 0]
    )
    assert [row["step"] for row in rows if row["accuracy/task known"]] == ["1", "2"]


def test_tensorboard_gets_everything(learned_tasks, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    learner, tasks, progress = learned_tasks
    tracker = open_tracker("tensorboard", tmp_path, "a run")
    for at in progress:
        tracker(at)
    tracker.log_evaluation(cps.evaluate(learner, tasks, group_sizes=[1]))
    events = EventAccumulator(str(next(tmp_path.rglob("events*")).parent))
    events.Reload()
    assert [event.step for event in events.Scalars("loss/retraining")] == [4, 5, 6, 7, 11, 12, 13, 14]
    assert [event.step for event in events.Scalars("accuracy/task known")] == [1, 2]


def test_a_run_of_wandb_gets_everything(learned_tasks, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    learner, tasks, progress = learned_tasks
    tracker = open_tracker("wandb", tmp_path, "a run")
    for at in progress:
        tracker(at)
    tracker.log_evaluation(cps.evaluate(learner, tasks, group_sizes=[1]))
    summary = dict(tracker._logger.summary)
    tracker._logger.finish()
    assert summary["epoch"] == 14
    assert summary["task"] == 2
    assert summary["loss/retraining"] == progress[-1].loss


@pytest.mark.parametrize("logger", [logging.getLogger("cps"), "a folder", None], ids=str)
def test_an_object_that_takes_no_metrics_raises(logger):
    with pytest.raises(TypeError, match="a logger must have log_metrics, log or add_scalar"):
        cps.Tracker(logger)


@pytest.mark.parametrize("kind", ["tensorboard", "wandb"])
def test_a_missing_package_is_named(kind, tmp_path, monkeypatch):
    if kind == "tensorboard":
        monkeypatch.setattr("lightning_fabric.loggers.tensorboard._TENSORBOARD_AVAILABLE", False)
        monkeypatch.setattr("lightning_fabric.loggers.tensorboard._TENSORBOARDX_AVAILABLE", False)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        ValueError, match=f"a log for {kind} needs a package that is not installed; run: pip install {kind}"
    ):
        open_tracker(kind, tmp_path, "a run")


@pytest.mark.slow
def test_bench_logs_losses_and_accuracies(tmp_path):
    run_cps(
        "bench", "digits", "--tasks", "2", "--epochs-scale", "0.1", "--group-sizes", "1", "--log", "csv",
        "--out", str(tmp_path), *CPU,
    )  # fmt: skip
    rows = read_csv(tmp_path / "log")
    for name in ("loss/training", "loss/retraining", "loss/finetuning", "accuracy/task known", "accuracy/Fusion/1"):
        assert any(row[name] for row in rows), name
    done = run_cps("bench", "digits", "--log", "paper", "--out", str(tmp_path), *CPU, code=1)
    assert "unknown kind of log 'paper'; choose from: csv, tensorboard, wandb" in done.output
