"""Invariant 5: the same seed gives the same result; a run that was killed ends as one that was not."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import cps
from cps.methods.baselines import Baseline
from cps.storage import container as storage
from cps.training import checkpoint
from samples import conv_net, make_task


def fingerprints(learner):
    return [learner.fingerprint(task) for task in range(len(learner.network.subnetworks))]


class Dropping(torch.nn.Sequential):
    """A network with dropout, so that resuming must restore its randomness too."""

    def __init__(self):
        super().__init__(*conv_net(), torch.nn.Dropout(0.3))


@pytest.mark.parametrize("optimizer", [cps.SGD(0.05), cps.Adam(1e-2), cps.AdamW(1e-2)], ids=str)
def test_an_interrupted_run_equals_an_uninterrupted_one_at_every_epoch(make_learner, tmp_path, monkeypatch, optimizer):
    monkeypatch.setattr(checkpoint, "BUSY_SHARE", math.inf)  # epochs this short would be skipped
    training = cps.Training(2, optimizer, cps.Cosine(), batch_size=8)
    settings = {"train": training, "retrain": training, "rounds": 2, "augment": cps.PadCrop(1)}

    def make():
        torch.manual_seed(0)
        return make_learner(Dropping(), **settings)

    whole = make()
    whole.learn(make_task(0))
    whole.learn(make_task(10))
    for stop in range(1, 7):
        learner = make()
        learner.learn(make_task(0))
        seen = []

        def stop_here(at, seen=seen, stop=stop):
            seen.append(at)
            if len(seen) == stop:
                raise KeyboardInterrupt

        learner.watch = stop_here
        path = tmp_path / f"{stop}.safetensors"
        with pytest.raises(KeyboardInterrupt):
            learner.learn(make_task(10), checkpoint=path)
        again = make()
        again.learn(make_task(0))
        more = []
        again.watch = more.append
        again.learn(make_task(10), checkpoint=path)
        assert len(seen) + len(more) == 6  # no epoch was done twice
        assert fingerprints(again) == fingerprints(whole)
        assert storage.digest(again.network.weights) == storage.digest(whole.network.weights)  # free ones too


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(make_learner):
    def run(seed):
        learner = make_learner(seed=seed)
        learner.learn(make_task(0))
        return learner.fingerprint(0)

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_learning_leaves_the_global_generator_alone(make_learner):
    learner = make_learner(Dropping())
    state = torch.random.get_rng_state()
    learner.learn(make_task(0))
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_checkpoint_of_other_work_is_refused(make_learner, tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    stopped = make_learner()
    stopped.watch = lambda at: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        stopped.learn(make_task(0), checkpoint=path)
    with pytest.raises(ValueError, match=r"other work \(it differs in: seed \(0, now 5\)\)"):
        make_learner(seed=5).learn(make_task(0), checkpoint=path)
    with pytest.raises(ValueError, match="classes"):
        make_learner().learn(make_task(20), checkpoint=path)
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


def test_a_damaged_checkpoint_costs_time_but_nothing_else(make_learner, tmp_path, caplog):
    path = tmp_path / "checkpoint.safetensors"
    path.write_bytes(b"half a file")
    learner, whole = make_learner(), make_learner()
    learner.learn(make_task(0), checkpoint=path)
    whole.learn(make_task(0))
    assert "starts from its beginning" in caplog.text
    assert learner.fingerprint(0) == whole.fingerprint(0)


def test_the_checkpoint_of_a_finished_task_is_passed_over(make_learner, tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    learner, whole = make_learner(), make_learner()
    for task in (make_task(0), make_task(10)):
        learner.learn(task, checkpoint=path)
        whole.learn(task)
    assert fingerprints(learner) == fingerprints(whole)


BENCH = [sys.executable, "-m", "cps", "bench", "digits", "--epochs-scale", "0.1", "--accelerator", "cpu"]


def without_times(folder):
    results = json.loads((folder / "results.json").read_text())
    del results["seconds"], results["milliseconds_per_image"]
    return results


def test_a_run_killed_at_random_moments_ends_with_the_same_result_to_the_bit(tmp_path):
    """SIGKILL during start, training, pruning, saving or evaluation: the same command goes on."""
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


def test_ctrl_c_stops_cleanly_and_says_how_to_go_on(tmp_path):
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
    """A data set that augments by torch's generator."""

    def __init__(self, first):
        self.images, self.targets = make_task(first).train

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.images[index] + torch.randn(2, 6, 6), self.targets[index]


def test_an_augmenting_data_set_resumes_to_the_bit_too(make_learner, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "BUSY_SHARE", math.inf)
    task = cps.Task([0, 1], train=Noisy(0))
    whole = make_learner(rounds=2)
    state = torch.random.get_rng_state()
    whole.learn(task)
    assert torch.equal(state, torch.random.get_rng_state())
    for stop in (2, 3, 5):
        seen = []

        def stop_here(at, seen=seen, stop=stop):
            seen.append(at)
            if len(seen) == stop:
                raise KeyboardInterrupt

        path = tmp_path / f"{stop}.safetensors"
        with pytest.raises(KeyboardInterrupt):
            make_learner(rounds=2, watch=stop_here).learn(task, checkpoint=path)
        torch.rand(stop)  # whatever the program does in between
        again = make_learner(rounds=2)
        again.learn(task, checkpoint=path)
        assert again.fingerprint(0) == whole.fingerprint(0)


def stopped_after_an_epoch(learner, task, path):
    learner.watch = lambda at: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        learner.learn(task, checkpoint=path)


def test_a_checkpoint_of_other_pixels_is_refused(make_learner, tmp_path):
    path, task = tmp_path / "checkpoint.safetensors", make_task(0)
    stopped_after_an_epoch(make_learner(), task, path)
    other = cps.Task(task.classes, train=(task.train[0] + 1, task.train[1]))
    with pytest.raises(ValueError, match="pixels and labels"):
        make_learner().learn(other, checkpoint=path)


def test_own_functions_do_not_stand_in_the_way_of_resuming(make_learner, tmp_path):
    class MyPruner:
        def __call__(self, backbone, masks, batches):
            return masks

    def make():
        training = cps.Training(2, lambda parameters: torch.optim.Adam(parameters, 1e-2), batch_size=16)
        return make_learner(train=training, pruner=MyPruner())

    path = tmp_path / "checkpoint.safetensors"
    stopped_after_an_epoch(make(), make_task(0), path)
    learner, whole = make(), make()
    learner.learn(make_task(0), checkpoint=path)
    whole.learn(make_task(0))
    assert learner.fingerprint(0) == whole.fingerprint(0)


def test_whoever_watches_is_told_of_every_epoch_and_how_many_there_are(make_learner):
    warned = []
    learner = make_learner(watch=warned.append, train=cps.Training(3), rounds=2)
    learner.learn(make_task())
    assert [(at.task, at.done, at.total) for at in warned] == [(0, done, 7) for done in range(1, 8)]
    assert [(at.epoch, at.epochs) for at in warned] == [(1, 3), (2, 3), (3, 3), (1, 2), (2, 2), (1, 2), (2, 2)]
    assert list(dict.fromkeys(at.words for at in warned)) == [
        "training", "retraining, round 1 of 2", "retraining, round 2 of 2",
    ]  # fmt: skip


class Augmenting(torch.utils.data.Dataset):
    """Draws from the generators of numpy and of Python."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        noise = np.random.randn(2, 6, 6) + random.random()
        return torch.full((2, 6, 6), index % 2) + 0.1 * torch.from_numpy(noise).float(), index % 2


def test_a_data_set_that_augments_by_numpy_or_python_gives_the_same_bits_for_the_same_seed(make_learner):
    found = []
    for seed in (0, 0, 1):
        np.random.seed(len(found))  # whatever the program has drawn before
        before = np.random.get_state()[1].copy(), random.getstate()
        learner = make_learner(seed=seed)
        learner.learn(cps.Task([0, 1], train=Augmenting()))
        found.append(learner.fingerprint(0).tensors)
        assert (np.random.get_state()[1] == before[0]).all()
        assert random.getstate() == before[1]
    assert found[0] == found[1] != found[2]


def test_going_on_with_parts_that_no_file_can_hold_is_told(make_learner, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(checkpoint, "BUSY_SHARE", math.inf)
    path = tmp_path / "checkpoint.safetensors"

    def own(backbone, masks, batches):
        return masks

    def stop(at):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_learner(pruner=own, watch=stop).learn(make_task(), checkpoint=path)
    make_learner(pruner=own).learn(make_task(), checkpoint=path)
    assert "knows your own pruner only by how it prints" in caplog.text
    assert "train" not in caplog.messages[-1]


def test_finetuning_that_was_stopped_ends_as_one_that_was_not(tmp_path, fabric, monkeypatch):
    monkeypatch.setattr(checkpoint, "BUSY_SHARE", math.inf)
    tasks = [make_task(10 * index) for index in range(3)]

    def stop(phase, epoch):
        if (phase, epoch.done) == (2, 1):
            raise KeyboardInterrupt

    def baseline(watch=None):
        torch.manual_seed(0)
        return Baseline(conv_net(), tasks, cps.Training(2, batch_size=16), fabric=fabric, watch=watch)

    with pytest.raises(KeyboardInterrupt):
        baseline(stop).finetuning(tmp_path / "c")
    assert baseline().finetuning(tmp_path / "c") == baseline().finetuning()


def test_a_checkpoint_counts_the_time_of_all_calls(tmp_path):
    def saved(saver):
        saver.save(lambda: {}, lambda: {"state": {}, "param_groups": []}, checkpoint.Position(0, 1))
        return storage.read_header(tmp_path / "c", "checkpoint")["seconds"]

    first, second = (checkpoint.Checkpoint(tmp_path / "c", {}) for _ in range(2))
    first._since -= 100
    assert 100 <= saved(first) < 200
    second.load()
    assert 100 <= saved(second) < 200


def test_a_checkpoint_that_names_its_backbone_goes_on(make_learner, tmp_path, monkeypatch):
    """As those of early versions did, or did not where it was one of ours."""
    monkeypatch.setattr(checkpoint, "BUSY_SHARE", math.inf)

    def stop(at):
        if at.done == 2:
            raise KeyboardInterrupt

    learner = make_learner(watch=stop)
    with pytest.raises(KeyboardInterrupt):
        learner.learn(make_task(0), checkpoint=tmp_path / "c")
    header, tensors = storage.read(tmp_path / "c", "checkpoint")
    assert "backbone" not in header["identity"]["settings"]
    header["identity"]["settings"]["backbone"] = {"type": None, "was": "something"}
    storage.write(tmp_path / "c", "checkpoint", header, tensors)
    again, epochs = make_learner(), []
    again.watch = epochs.append
    again.learn(make_task(0), checkpoint=tmp_path / "c")
    assert len(epochs) == 2
