"""What several tests of the GPU paths share."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import cps
from cps.data.batch_transform import BatchTransform
from cps.data.examples import TensorExamples
from cps.network.classifier import Classifier
from cps.training.cuda.captured_step import CapturedStep
from cps.training.steps import EpochPlan
from samples import ACCELERATOR

needs_gpu = pytest.mark.skipif(ACCELERATOR == "cpu", reason="needs a GPU")


def odd_resnet():
    """Return a ResNet-18 whose widths are not multiples of eight."""
    torch.manual_seed(0)
    return cps.resnet18(3, (18, 21, 25, 30))


def plan_of(order, draws=None, factors=None):
    """Return a plan for batches of these indices."""
    number = sum(map(len, order))
    uniform = torch.zeros(number, 0) if draws is None else draws
    return EpochPlan(order, uniform, factors or [1.0] * len(order), [1.0] * len(order))


def small_step(backbone, features):
    """Return a captured step, its classifier, and a function that takes one step."""
    torch.manual_seed(0)
    images, labels = torch.randn(8, 3, 8, 8), torch.arange(8) % 2
    model = Classifier(backbone, nn.Linear(features, 2))
    training = cps.Training(1, cps.Adam(1e-2), batch_size=8)
    step = CapturedStep(model, images, training, BatchTransform(), is_bf16=False)
    examples, plan = TensorExamples(images, labels), plan_of([torch.arange(8)])
    return step, model, lambda: step.run(examples, plan)


def run_interpreted(script):
    """Run a script that prints "agrees", with the kernels in Triton's interpreter, in a new process on the CPU."""
    pytest.importorskip("triton", reason="NOT TESTED: the kernels need Triton, which is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    if "only 0-dimensional arrays can be converted" in run.stderr:
        pytest.skip("NOT TESTED: the interpreter of this version of Triton does not work with this version of numpy")
    if "'InterpretedFunction' object has no attribute 'warmup'" in run.stderr:
        pytest.skip("NOT TESTED: the interpreter of this version of Triton cannot compile kernels ahead of a launch")
    assert run.stdout == "agrees\n", run.stderr
