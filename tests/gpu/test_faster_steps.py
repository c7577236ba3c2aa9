"""The interface of the GPU steps: a faster step for a fit, or None and the reason."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import cps
from cps.data.batch_transform import BatchTransform
from cps.data.examples import DatasetExamples, TensorExamples
from cps.network.classifier import Classifier
from cps.network.freezing import Protected
from cps.runtime.process_state import RNG_LOCK
from cps.training import cuda
from cps.training.cuda import faster_steps
from cps.training.cuda.captured_step import CapturedStep
from cps.training.steps import Fit, StepCache
from samples import ListDataset, conv_net

ROOT = Path(__file__).parents[2]
IMAGES, LABELS = torch.randn(8, 3, 8, 8), torch.arange(8) % 2


@pytest.fixture
def fit():
    model = Classifier(conv_net(3), nn.Linear(12, 2))
    training = cps.Training(1, cps.Adam(1e-2), batch_size=4)
    return Fit(model, TensorExamples(IMAGES, LABELS), training, BatchTransform(), {}, 1)


@pytest.fixture
def cpu_fabric():
    return cps.make_fabric(accelerator="cpu")


def with_optimizer(fit, optimizer):
    return replace(fit, training=replace(fit.training, optimizer=optimizer))


def test_fits_of_the_same_shape_share_one_captured_step_and_the_last_one_is_kept(fit, cpu_fabric):
    cache = StepCache()
    first, warnings = faster_steps(fit, cpu_fabric, cache)
    assert isinstance(first, CapturedStep)
    assert not warnings
    more = TensorExamples(torch.cat([IMAGES, IMAGES]), torch.cat([LABELS, LABELS]))
    assert faster_steps(replace(fit, examples=more), cpu_fabric, cache) == (first, [])
    other, _ = faster_steps(replace(fit, training=replace(fit.training, batch_size=2)), cpu_fabric, cache)
    assert other is not first
    assert cache.steps is other
    off = torch.zeros(8, 3, 1, 1, dtype=torch.bool)
    scored = {"0.weight": Protected(~off, torch.zeros(8, 3, 3, 3), off, torch.ones(8, 3, 1, 1))}
    assert faster_steps(replace(fit, guard=scored), cpu_fabric, cache)[0] is not first  # mask scores need memory


def test_a_fit_that_cannot_be_captured_has_a_reason(fit, cpu_fabric):
    def reason(fit, fabric=cpu_fabric):
        steps, (warning,) = faster_steps(fit, fabric, StepCache())
        assert steps is None
        return warning.removeprefix("the training step is not captured as a CUDA graph: ")

    dataset = DatasetExamples(ListDataset(IMAGES, LABELS.tolist()), torch.tensor)
    assert reason(replace(fit, examples=dataset)) == "images that are read from a data set"
    groups = with_optimizer(fit, lambda values: torch.optim.SGD([{"params": [value]} for value in values], 0.1))
    unknown = "an optimizer other than SGD, Adam and AdamW with one group"
    assert reason(groups) == unknown
    assert reason(with_optimizer(fit, torch.optim.RMSprop)) == unknown
    precision = SimpleNamespace(precision=SimpleNamespace(precision="16-mixed"))
    several = SimpleNamespace(world_size=2, strategy=precision, device=torch.device("cpu"))
    assert reason(fit, several) == "several processes, precision 16-mixed"


def test_if_custom_kernels_fail_the_step_is_built_without_them_and_then_not_at_all(fit, cpu_fabric, monkeypatch):
    """There may be no C compiler, which Triton needs."""
    tried = []

    def fail(*_, has_custom_kernels, **__):
        tried.append(has_custom_kernels)
        raise RuntimeError(f"no compiler, custom kernels: {has_custom_kernels}\nand more")

    monkeypatch.setattr(cuda, "CapturedStep", fail)
    cache = StepCache()
    assert faster_steps(fit, cpu_fabric, cache) == (
        None,
        [
            "training continues without custom kernels: no compiler, custom kernels: True",
            "training continues without a CUDA graph: no compiler, custom kernels: False",
        ],
    )
    assert faster_steps(fit, cpu_fabric, cache) == (None, [])  # it is not tried again for the same kind of fit
    assert tried == [True, False]


def test_steps_are_built_in_turn_with_the_epochs_of_other_threads(fit, cpu_fabric, monkeypatch):
    is_locked = []
    monkeypatch.setattr(cuda, "CapturedStep", lambda *_, **__: is_locked.append(RNG_LOCK._is_owned()))
    faster_steps(fit, cpu_fabric, StepCache())
    assert is_locked == [True]


def test_only_a_long_training_is_worth_compiling(fit, cpu_fabric, monkeypatch):
    can_compile = []
    monkeypatch.setattr(cuda, "CapturedStep", lambda *_, **options: can_compile.append(options["can_compile"]))
    for total_epochs in (749, 750):  # of two steps each
        faster_steps(replace(fit, total_epochs=total_epochs), cpu_fabric, StepCache())
    assert can_compile == [False, True]


@pytest.mark.parametrize(
    ("module", "line", "is_kept"),
    [
        ("learner.py", "import torch", True),
        ("learner.py", "from cps.training.cuda import faster_steps", False),
        ("learner.py", "from cps.training.cuda.captured_step import CapturedStep", False),
        ("training/trainer.py", "from cps.training.cuda.captured_step import CapturedStep", False),
        ("training/steps.py", "from cps.training.cuda import faster_steps", False),
    ],
)
def test_an_import_past_the_interface_breaks_the_contract(tmp_path, module, line, is_kept):
    shutil.copytree(ROOT / "src" / "cps", tmp_path / "cps", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "cps" / module).open("a") as file:
        file.write(f"\n{line}\n")
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ("imports cps.training.cuda KEPT" in done.stdout) == is_kept, done.stdout[-3000:]
    assert ("imports cps.training.cuda BROKEN" in done.stdout) != is_kept, done.stdout[-3000:]
