"""The training loop: the order of an epoch, which steps it takes, and what a CPU never imports."""

import copy
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import cps
from cps.network.compact.cache import CompactCache
from cps.training import trainer as module
from cps.training.steps import PlainSteps
from cps.training.trainer import Trainer, epoch_order
from samples import ACCELERATOR, conv_net, make_task

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(("images", "batch", "processes"), [(10, 4, 1), (9, 4, 1), (10, 4, 2), (3, 128, 1), (9, 4, 2)])
def test_an_epoch_has_each_image_once_and_no_batch_too_small_for_batch_norm(images, batch, processes):
    batches = list(epoch_order(images, batch, torch.Generator().manual_seed(0), processes))
    seen = torch.cat(batches).tolist()
    assert len(set(seen)) == len(seen) >= images - 2 * processes + 1
    assert all(len(indices) >= 2 * processes for indices in batches)


@pytest.mark.parametrize(("images", "left_out"), [(5000, 8), (2500, 0), (330, 0)])
def test_a_small_last_batch_after_many_full_ones_is_left_out(images, left_out):
    batches = list(epoch_order(images, 128, torch.Generator().manual_seed(0)))
    assert sum(map(len, batches)) == images - left_out


def test_an_epoch_too_small_for_its_processes_raises():
    with pytest.raises(ValueError, match="too small"):
        list(epoch_order(1, 4, torch.Generator(), 2))


SCRIPT = """
import sys
import torch
from torch import nn

def modules(package):
    return {name for name in sys.modules if name == package or name.startswith(f"{package}.")}

model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
optimizer = torch.optim.Adam(model.parameters())
nn.functional.cross_entropy(model(torch.randn(4, 2, 6, 6)), torch.zeros(4, dtype=torch.long)).backward()
optimizer.step()
by_torch = modules("triton")  # torch imports Triton by itself

import cps
from samples import ACCELERATOR, conv_net, make_task
training = cps.Training(1, cps.Adam(1e-2), batch_size=16)
fabric = cps.make_fabric(accelerator="cpu")
learner = cps.Learner(conv_net(), train=training, retrain=training, rounds=1, fabric=fabric)
learner.learn(make_task())
assert modules("cps.training")  # the negative control
print(sorted(modules("cps.training.cuda")), sorted(modules("triton") - by_torch))
"""


@pytest.mark.slow
def test_training_on_a_cpu_imports_neither_the_gpu_steps_nor_triton():
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "[] []\n"


def test_a_copied_trainer_does_not_have_the_captured_step(make_learner):
    learner, task = make_learner(), make_task(0)
    learner.learn(task)
    learner._trainer._step_cache.steps = threading.Lock()  # which cannot be copied, as a CUDA graph
    learner.network._compact._parallel[1, 2] = threading.Lock()
    other = copy.deepcopy(learner)
    assert other._trainer._step_cache.steps is None
    assert other.predict(task.test[0]).classes == learner.predict(task.test[0]).classes
    assert isinstance(other.network._compact, CompactCache)


def test_all_phases_of_a_task_share_the_number_of_epochs_that_decides_about_compiling(make_learner, monkeypatch):
    """Two epochs of training and two of retraining in each round."""
    total_epochs, steps_for = [], Trainer._steps_for
    monkeypatch.setattr(
        Trainer, "_steps_for", lambda self, fit: total_epochs.append(fit.total_epochs) or steps_for(self, fit)
    )
    make_learner(rounds=2).learn(make_task(0))
    assert total_epochs == [6] * 3
    total_epochs.clear()
    make_learner(rounds=1).learn(make_task(0))
    assert total_epochs == [4] * 2


def test_on_a_gpu_the_reason_for_plain_steps_is_logged_once(monkeypatch, caplog):
    pytest.importorskip("cps.training.cuda")
    plain = object()
    monkeypatch.setattr("cps.training.cuda.faster_steps", lambda fit, fabric, cache: (None, ["too little memory"]))
    monkeypatch.setattr(module, "PlainSteps", lambda *_: plain)
    trainer = Trainer(SimpleNamespace(device=torch.device("cuda")))
    fit = SimpleNamespace(model=None, training=None, transform=None)
    assert [trainer._steps_for(fit) for _ in range(2)] == [plain] * 2
    assert [record.message for record in caplog.records] == ["too little memory"]


def test_on_a_cpu_steps_are_plain():
    training = cps.Training(1, cps.Adam(1e-2))
    model = SimpleNamespace(model=nn.Linear(2, 2), training=training, transform=None)
    assert isinstance(Trainer(cps.make_fabric(accelerator="cpu"))._steps_for(model), PlainSteps)


def test_a_float64_backbone_raises_in_mixed_precision(make_learner):
    fabric = cps.make_fabric(accelerator=ACCELERATOR, precision="bf16-mixed")
    with pytest.raises(ValueError, match="float64 cannot be trained in bf16-mixed; pass fabric="):
        make_learner(conv_net().double(), fabric=fabric).learn(make_task(0))
