"""Fabrics, precision and what several processes share; with several processes: tests/training/test_distributed.py."""

import copy
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import cps
from cps.runtime import devices
from cps.runtime.devices import (
    average_buffers,
    broadcast,
    deterministic_cudnn,
    full_precision,
    launch,
    on_rank_zero,
    precision_of,
    without_autocast,
)
from samples import ACCELERATOR


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accelerator": "tpu"}, "unknown accelerator 'tpu'; choose from: auto, cpu, cuda, gpu, mps"),
        ({"accelerator": "cpu", "precision": "16-mixed"}, "precision '16-mixed' needs a GPU; use 'bf16-mixed'"),
        ({"accelerator": "cpu", "precision": "64-true"}, "unsupported precision '64-true'; choose from: 32-true"),
    ],
)
def test_options_that_cannot_be_used_raise(options, message):
    with pytest.raises(ValueError, match=message):
        cps.make_fabric(**options)


def test_missing_gpus_raise(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ValueError, match="accelerator 'cuda' needs a GPU, but torch finds none; use accelerator 'cpu'"):
        cps.make_fabric(accelerator="cuda")
    with pytest.raises(ValueError, match="accelerator 'mps' needs an Apple GPU"):
        cps.make_fabric(accelerator="mps")


@pytest.mark.parametrize(("is_fast", "precision"), [(True, "bf16-mixed"), (False, "32-true")])
def test_a_cpu_trains_in_bfloat16_if_it_is_fast_in_it(monkeypatch, is_fast, precision):
    monkeypatch.setattr(devices, "has_fast_bfloat16", lambda: is_fast)
    assert precision_of(cps.make_fabric(accelerator="cpu")) == precision
    assert precision_of(cps.make_fabric(accelerator="cpu", precision="32-true")) == "32-true"


def test_a_fabric_is_launched_once():
    fabric = cps.make_fabric(accelerator="cpu", precision="32-true")
    assert precision_of(fabric) == "32-true"
    assert launch(fabric) is fabric
    unsupported = devices._lightning_fabric().Fabric(accelerator="cpu", devices=1, precision="64-true")
    with pytest.raises(ValueError, match="unsupported precision '64-true'"):
        launch(unsupported)


PREDICT = """
import sys
import torch
import cps
from samples import conv_net, make_task

learner = cps.load(sys.argv[1], conv_net())
learner.predict(torch.rand(3, 2, 6, 6))
print({name for name in ("lightning_fabric", "torch._dynamo", "sympy") if name in sys.modules})
learner.configure(train=cps.Training(1, cps.Adam(), batch_size=16), rounds=0)
learner.learn(make_task(10))
print("lightning_fabric" in sys.modules)
"""


@pytest.mark.slow
def test_a_prediction_on_a_cpu_imports_neither_lightning_nor_the_compiler_of_torch():
    tests = Path(__file__).parents[1]
    model = tests / "fixtures" / "version0" / "one-task.model"
    paths = os.pathsep.join([str(tests), *sys.path])
    output = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PREDICT, str(model)],
        env={**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert output.split("\n")[:2] == ["set()", "True"]  # True: the negative control


def test_the_fabric_of_a_cpu_can_be_copied_before_and_after_training():
    fabric = cps.make_fabric(accelerator="cpu", precision="32-true")
    for _ in range(2):
        for copied in (copy.deepcopy(fabric), pickle.loads(pickle.dumps(fabric))):
            assert (precision_of(copied), copied.world_size, copied.device) == ("32-true", 1, torch.device("cpu"))
        model = nn.Linear(2, 2)
        fabric.setup(model, torch.optim.SGD(model.parameters()))


def test_one_process_shares_with_itself():
    fabric = cps.make_fabric(accelerator="cpu")
    tensors = {"a": torch.ones(2)}
    assert broadcast(tensors, fabric) is tensors
    norm = nn.BatchNorm1d(2)
    average_buffers(norm, fabric)
    assert norm.running_var.tolist() == [1, 1]


def test_an_error_on_rank_zero_is_raised():
    fabric, done = cps.make_fabric(accelerator="cpu"), []
    on_rank_zero(fabric, lambda: done.append(1))
    assert done == [1]

    def fail():
        raise KeyError("why")

    with pytest.raises(KeyError, match="why"):
        on_rank_zero(fabric, fail)


def test_switches_of_torch_are_set_and_restored(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with deterministic_cudnn():
        assert torch.backends.cudnn.deterministic
        assert not torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.benchmark
    before = torch.backends.cuda.matmul.fp32_precision
    with full_precision():
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert torch.backends.cudnn.deterministic
    assert torch.backends.cuda.matmul.fp32_precision == before


def test_autocast_of_the_caller_is_disabled():
    layer, values = nn.Linear(2, 2), torch.ones(1, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(values).dtype == torch.bfloat16
        with without_autocast(torch.device("cpu")):
            assert layer(values).dtype == torch.float32
        assert layer(values).dtype == torch.bfloat16


def test_the_information_that_lightning_logs_about_devices_is_suppressed():
    lightning = devices._lightning_fabric()
    logged, listener = [], logging.Handler()
    listener.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger(f"{lightning.__name__}.utilities.rank_zero").addHandler(listener)
    cps.make_fabric(accelerator=ACCELERATOR, precision="bf16-mixed")
    assert not logged
    lightning.Fabric(accelerator=ACCELERATOR, precision="bf16-mixed", devices=1)
    assert "bfloat16" in logged[0]


def test_a_single_process_does_not_search_for_a_cluster(monkeypatch):
    from lightning_fabric.plugins.environments import MPIEnvironment

    monkeypatch.setattr(MPIEnvironment, "detect", lambda: pytest.fail("MPI was started"))
    assert cps.make_fabric(accelerator="cpu").world_size == 1
