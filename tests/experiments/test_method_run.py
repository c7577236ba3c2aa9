"""One method on a sequence of tasks: it resumes wherever it was interrupted, and nothing counts twice."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cps
from cps.experiments import method_run
from cps.experiments.method_run import MeasuringProgress, MethodRun
from cps.methods.blocks.memory import Memory
from cps.methods.closed_form import ClosedForm
from cps.methods.joint import Joint
from cps.methods.replay.experience_replay import ExperienceReplay
from cps.selection.softmax_mass import SoftmaxMass
from cps.training import checkpoint
from samples import conv_net, make_task

TASKS = [make_task(10 * index, test=12) for index in range(3)]
QUICK = cps.Training(2, cps.Adam(1e-2), batch_size=16)


def backbone():
    torch.manual_seed(0)
    return conv_net()


def make(kind, fabric):
    if kind is ClosedForm:
        return ClosedForm(cps.RandomReLU(20), cps.LDA(0.1))
    if kind is cps.Learner:
        return cps.Learner(backbone(), rounds=1, train=QUICK, retrain=QUICK, selectors=[cps.MaxOutput()], fabric=fabric)
    settings = {"memory": Memory(12)} if kind is ExperienceReplay else {}
    return kind(backbone(), train=QUICK, fabric=fabric, **settings)


def load(kind, fabric, path):
    if kind is ClosedForm:
        return ClosedForm.load(path)
    if kind is cps.Learner:
        return cps.load(path, backbone(), fabric=fabric)
    method = make(kind, fabric)
    method.load(path)
    return method


def run_in(folder, kind, fabric, **changes):
    selectors = [cps.MaxOutput(), *([SoftmaxMass()] if kind is ExperienceReplay else [])]
    run = MethodRun(
        lambda: make(kind, fabric),
        lambda path: load(kind, fabric, path),
        folder,
        {"seed": 0},
        selectors,
        [1, 4],
    )
    return replace(run, **changes)


def without_seconds(measured):
    assert measured.is_complete
    assert measured.seconds > 0
    return replace(measured, seconds=0.0)


@pytest.mark.parametrize("kind", [ExperienceReplay, cps.Learner, ClosedForm, Joint])
def test_a_run_measures_every_task_and_leaves_its_record_only(kind, fabric, tmp_path):
    measured = run_in(tmp_path, kind, fabric).start(TASKS)
    assert [len(row.known) for row in measured.rows] == ([3] if kind is Joint else [1, 2, 3])
    assert (
        measured.image_passes
        == {ClosedForm: 0, ExperienceReplay: 2 * (24 + 36 + 36), cps.Learner: 3 * 4 * 24, Joint: 2 * 72}[kind]
    )
    assert measured.kept == make_and_learn(kind, fabric).kept()
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert run_in(tmp_path, kind, fabric, make=None, load=None).start(TASKS) == measured  # nothing runs again


def make_and_learn(kind, fabric):
    method = make(kind, fabric)
    if kind is Joint:
        method.learn_all(TASKS)
    else:
        for task in TASKS:
            method.learn(task)
    return method


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ExperienceReplay, cps.Learner, Joint])
def test_a_run_that_is_interrupted_at_any_write_ends_as_one_that_was_not(kind, fabric, tmp_path, monkeypatch):
    """Before the record, the checkpoint or the method is replaced by a new one, and right after it."""
    monkeypatch.setattr(checkpoint, "MAX_WRITING_SHARE", math.inf)  # epochs this short would be skipped
    monkeypatch.setattr(method_run, "WRITING_INTERVAL", 0.0)
    replace_file, writes = Path.replace, []

    def counting(self, target):
        writes.append(target)
        if len(writes) == stop:
            if stop % 2:
                replace_file(self, target)
            raise KeyboardInterrupt
        return replace_file(self, target)

    monkeypatch.setattr(Path, "replace", counting)
    stop = None
    whole = without_seconds(run_in(tmp_path / "whole", kind, fabric).start(TASKS[:2]))
    total = len(writes)
    assert total >= 8
    for stop in range(1, total + 1):
        folder = tmp_path / str(stop)
        writes.clear()
        with pytest.raises(KeyboardInterrupt):
            run_in(folder, kind, fabric).start(TASKS[:2])
        assert without_seconds(run_in(folder, kind, fabric).start(TASKS[:2])) == whole, stop
        assert [path.name for path in folder.iterdir() if path.suffix != ".partial"] == ["run.json"]


def test_a_run_that_is_interrupted_after_an_epoch_repeats_no_epoch(fabric, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "MAX_WRITING_SHARE", math.inf)
    seen = []

    def stop_in_the_second_task(at):
        seen.append((at.task, at.phase_name, at.epoch))
        if at.task == 1 and at.epoch == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_in(tmp_path, ExperienceReplay, fabric, on_epoch=stop_in_the_second_task).start(TASKS[:2])
    run_in(
        tmp_path, ExperienceReplay, fabric, on_epoch=lambda at: seen.append((at.task, at.phase_name, at.epoch))
    ).start(TASKS[:2])
    training = [(task, epoch) for task, phase, epoch in seen if phase == "training"]
    assert training == [(0, 1), (0, 2), (1, 1), (1, 2)]
    measuring = [task for task, phase, _ in seen if phase == MeasuringProgress(0).phase_name]
    assert measuring == [0, 1]


def test_the_seconds_of_interrupted_calls_count(fabric, tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(method_run.time, "monotonic", lambda: now[0])

    def take_five_seconds(at):
        now[0] += 5
        if at.task == 1 and now[0] <= 20:
            raise KeyboardInterrupt

    options = {"on_epoch": take_five_seconds}
    with pytest.raises(KeyboardInterrupt):
        run_in(tmp_path, ExperienceReplay, fabric, **options).start(TASKS[:2])
    stopped = json.loads((tmp_path / "run.json").read_text())["seconds"]
    assert stopped == 15  # two epochs of the first task and one of the second; measuring does not count
    measured = run_in(tmp_path, ExperienceReplay, fabric, **options).start(TASKS[:2])
    assert measured.seconds == stopped + 5  # no epoch is repeated


def test_another_run_and_a_damaged_record_are_refused(fabric, tmp_path):
    run_in(tmp_path, ClosedForm, fabric).start(TASKS[:1])
    with pytest.raises(ValueError, match=r"holds another run \(it differs in: seed\)"):
        run_in(tmp_path, ClosedForm, fabric, identity={"seed": 1}).start(TASKS[:1])
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ValueError, match=r"run.json' is damaged .* delete the folder to start over"):
        run_in(tmp_path, ClosedForm, fabric).start(TASKS[:1])
