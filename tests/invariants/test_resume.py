"""Invariant 5: a run that was interrupted or killed ends with the same bits as one that was not."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

import cps
from cps.runtime.devices import precision_of
from cps.storage import container as storage
from cps.training import checkpoint
from samples import ACCELERATOR, DropoutNet, conv_net, make_task


def fingerprints(learner):
    return [learner.fingerprint(task) for task in range(len(learner.network.subnetworks))]


@pytest.mark.parametrize("optimizer", [cps.SGD(0.05), cps.Adam(1e-2), cps.AdamW(1e-2)], ids=str)
def test_an_interrupted_run_equals_an_uninterrupted_one_at_every_epoch(make_learner, tmp_path, monkeypatch, optimizer):
    monkeypatch.setattr(checkpoint, "MAX_WRITING_SHARE", math.inf)  # checkpoints of such short epochs would be skipped
    training = cps.Training(2, optimizer, cps.Cosine(), batch_size=8)
    settings = {"train": training, "retrain": training, "rounds": 2, "augment": cps.PadCrop(1)}

    def make():
        torch.manual_seed(0)
        return make_learner(DropoutNet(), **settings)

    whole = make()
    whole.learn(make_task(0))
    whole.learn(make_task(10))
    for stop in range(1, 7):
        learner = make()
        learner.learn(make_task(0))
        seen = []

        def stop_here(progress, seen=seen, stop=stop):
            seen.append(progress)
            if len(seen) == stop:
                raise KeyboardInterrupt

        learner.on_epoch = stop_here
        path = tmp_path / f"{stop}.safetensors"
        with pytest.raises(KeyboardInterrupt):
            learner.learn(make_task(10), checkpoint=path)
        again = make()
        again.learn(make_task(0))
        more = []
        again.on_epoch = more.append
        again.learn(make_task(10), checkpoint=path)
        assert len(seen) + len(more) == 6  # no epoch was done twice
        assert fingerprints(again) == fingerprints(whole)
        assert storage.digest(again.network.weights) == storage.digest(whole.network.weights)  # including free weights


def test_a_checkpoint_of_another_run_raises(make_learner, tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    stopped = make_learner()
    stopped.on_epoch = lambda progress: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        stopped.learn(make_task(0), checkpoint=path)
    with pytest.raises(ValueError, match=r"another run \(it differs in: seed \(0, now 5\)\)"):
        make_learner(seed=5).learn(make_task(0), checkpoint=path)
    with pytest.raises(ValueError, match="classes"):
        make_learner().learn(make_task(20), checkpoint=path)
    before = precision_of(stopped.fabric)
    now = "32-true" if before == "bf16-mixed" else "bf16-mixed"
    with pytest.raises(ValueError, match=rf"another run \(it differs in: precision \({before}, now {now}\)\)"):
        make_learner(fabric=cps.make_fabric(accelerator=ACCELERATOR, precision=now)).learn(
            make_task(0), checkpoint=path
        )
    torch.manual_seed(0)
    other = conv_net()
    other[0].weight.data.mul_(2)
    with pytest.raises(ValueError, match=r"differs in: earlier tasks\)"):
        make_learner(other).learn(make_task(0), checkpoint=path)
    torch.manual_seed(0)
    other = conv_net()
    other[1].weight.data.mul_(2)
    with pytest.raises(ValueError, match=r"differs in: backbone\)"):
        make_learner(other).learn(make_task(0), checkpoint=path)


def test_a_damaged_checkpoint_is_ignored_with_a_warning(make_learner, tmp_path, caplog):
    path = tmp_path / "checkpoint.safetensors"
    path.write_bytes(b"half a file")
    learner, whole = make_learner(), make_learner()
    learner.learn(make_task(0), checkpoint=path)
    whole.learn(make_task(0))
    assert "starts from the beginning" in caplog.text
    assert learner.fingerprint(0) == whole.fingerprint(0)


def test_the_checkpoint_of_a_finished_task_is_ignored(make_learner, tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    learner, whole = make_learner(), make_learner()
    for task in (make_task(0), make_task(10)):
        learner.learn(task, checkpoint=path)
        whole.learn(task)
    assert fingerprints(learner) == fingerprints(whole)


BENCH = [sys.executable, "-m", "cps", "bench", "digits", "--epochs-scale", "0.1", "--accelerator", "cpu"]


def without_times(folder):
    results = json.loads((folder / "results.json").read_text())
    del results["seconds"], results["milliseconds_per_image"], results["bounds"]["closed_form"]["seconds"]
    return results


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_with_the_same_result_to_the_bit(tmp_path):
    """SIGKILL during start, training, pruning, saving or evaluation: the same command resumes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*BENCH, "--out", tmp_path / "whole"], env=environment, check=True, capture_output=True)
    draws = random.Random(0)
    kills = 0
    for _ in range(40):
        run = subprocess.Popen(
            [*BENCH, "--out", tmp_path / "killed"], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        try:
            run.wait(timeout=3.5 + draws.random() * 2.5 if kills < 2 else None)
        except subprocess.TimeoutExpired:
            run.send_signal(signal.SIGKILL)
            kills += 1
        _, stderr = run.communicate()
        if run.returncode == 0:
            break
        assert run.returncode == -signal.SIGKILL, stderr.decode()
    assert kills > 0
    assert without_times(tmp_path / "killed") == without_times(tmp_path / "whole")


@pytest.mark.slow
def test_ctrl_c_stops_cleanly_and_says_how_to_resume(tmp_path):
    run = subprocess.Popen(
        [*BENCH, "--out", tmp_path / "run"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background shell ignores it
    )
    while not (tmp_path / "run" / "checkpoint.safetensors").exists():
        assert run.poll() is None
        time.sleep(0.01)
    run.send_signal(signal.SIGINT)
    _, stderr = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "same command again" in stderr.decode()
    assert "Traceback" not in stderr.decode()


class Noisy(torch.utils.data.Dataset):
    """A dataset that augments with torch's global generator."""

    def __init__(self, first):
        self.images, self.targets = make_task(first).train

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.images[index] + torch.randn(2, 6, 6), self.targets[index]


def test_a_dataset_that_augments_resumes_to_the_same_bits(make_learner, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "MAX_WRITING_SHARE", math.inf)
    task = cps.Task([0, 1], train=Noisy(0))
    whole = make_learner(rounds=2)
    state = torch.random.get_rng_state()
    whole.learn(task)
    assert torch.equal(state, torch.random.get_rng_state())
    for stop in (2, 3, 5):
        seen = []

        def stop_here(progress, seen=seen, stop=stop):
            seen.append(progress)
            if len(seen) == stop:
                raise KeyboardInterrupt

        path = tmp_path / f"{stop}.safetensors"
        with pytest.raises(KeyboardInterrupt):
            make_learner(rounds=2, on_epoch=stop_here).learn(task, checkpoint=path)
        torch.rand(stop)  # other draws in between must not matter
        again = make_learner(rounds=2)
        again.learn(task, checkpoint=path)
        assert again.fingerprint(0) == whole.fingerprint(0)


def stop_after_an_epoch(learner, task, path):
    learner.on_epoch = lambda progress: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        learner.learn(task, checkpoint=path)


def test_a_checkpoint_of_other_pixels_raises(make_learner, tmp_path):
    path, task = tmp_path / "checkpoint.safetensors", make_task(0)
    stop_after_an_epoch(make_learner(), task, path)
    other = cps.Task(task.classes, train=(task.train[0] + 1, task.train[1]))
    with pytest.raises(ValueError, match="pixels and labels"):
        make_learner().learn(other, checkpoint=path)


def test_runs_with_custom_functions_can_be_resumed(make_learner, tmp_path):
    class MyPruner:
        def __call__(self, backbone, masks, batches):
            return masks

    def make():
        training = cps.Training(2, lambda parameters: torch.optim.Adam(parameters, 1e-2), batch_size=16)
        return make_learner(train=training, pruner=MyPruner())

    path = tmp_path / "checkpoint.safetensors"
    stop_after_an_epoch(make(), make_task(0), path)
    learner, whole = make(), make()
    learner.learn(make_task(0), checkpoint=path)
    whole.learn(make_task(0))
    assert learner.fingerprint(0) == whole.fingerprint(0)


def test_resuming_with_a_custom_pruner_logs_that_it_cannot_be_compared(make_learner, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(checkpoint, "MAX_WRITING_SHARE", math.inf)
    path = tmp_path / "checkpoint.safetensors"

    def own(backbone, masks, batches):
        return masks

    def stop(progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_learner(pruner=own, on_epoch=stop).learn(make_task(), checkpoint=path)
    make_learner(pruner=own).learn(make_task(), checkpoint=path)
    assert "has only the repr of your own pruner" in caplog.text
    assert "your own train" not in caplog.text


def test_a_checkpoint_counts_the_time_of_all_calls(tmp_path):
    def saved(saver):
        saver.save(lambda: {}, lambda: {"state": {}, "param_groups": []}, checkpoint.Position(0, 1))
        return storage.read_header(tmp_path / "c", "checkpoint")["seconds"]

    first, second = (checkpoint.Checkpoint(tmp_path / "c", {}) for _ in range(2))
    first._started -= 100
    assert 100 <= saved(first) < 200
    second.load()
    assert 100 <= saved(second) < 200


def test_an_early_checkpoint_that_names_its_backbone_resumes(make_learner, tmp_path, monkeypatch):
    """Early versions wrote the backbone into checkpoints."""
    monkeypatch.setattr(checkpoint, "MAX_WRITING_SHARE", math.inf)

    def stop(progress):
        if progress.done == 2:
            raise KeyboardInterrupt

    learner = make_learner(on_epoch=stop)
    with pytest.raises(KeyboardInterrupt):
        learner.learn(make_task(0), checkpoint=tmp_path / "c")
    header, tensors = storage.read(tmp_path / "c", "checkpoint")
    assert "backbone" not in header["identity"]["settings"]
    header["identity"]["settings"]["backbone"] = {"type": None, "was": "something"}
    storage.write(tmp_path / "c", "checkpoint", header, tensors)
    again, epochs = make_learner(), []
    again.on_epoch = epochs.append
    again.learn(make_task(0), checkpoint=tmp_path / "c")
    assert len(epochs) == 2
