"""The optimizer step in one custom kernel does what PyTorch's optimizer and the guard do."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import cps
from cps.network.freezing import Protected
from cps.training.cuda.flat_parameters import FlatParameters
from cps.training.cuda.optimizer_step import OptimizerStep
from gpu.helpers import needs_gpu
from samples import ACCELERATOR

UNSUPPORTED = {
    "nesterov": lambda values: torch.optim.SGD(values, 0.1, 0.9, nesterov=True),
    "no momentum": lambda values: torch.optim.SGD(values, 0.1),
    "amsgrad": lambda values: torch.optim.Adam(values, amsgrad=True),
    "a beta of zero": lambda values: torch.optim.Adam(values, betas=(0.0, 0.99)),
    "another class": torch.optim.RMSprop,
}


@needs_gpu
@pytest.mark.parametrize("optimizer", [cps.SGD(0.1), cps.Adam(1e-2), cps.AdamW(1e-2)], ids=repr)
def test_the_custom_kernel_takes_the_steps_of_pytorchs_optimizer(optimizer):
    torch.manual_seed(0)
    start, kept = torch.randn(5003, device=ACCELERATOR), torch.rand(5003, device=ACCELERATOR) < 0.3
    gradients = torch.randn(5, 5003, device=ACCELERATOR)
    found = []
    for has_kernel in (False, True):
        flat = FlatParameters({"a": nn.Parameter(start.clone())})
        step = OptimizerStep(flat, optimizer, flat.views, ())
        step.make_capturable(is_fused=not has_kernel)
        step()
        if has_kernel:
            step.use_custom_kernel()
        assert step.has_custom_kernel == has_kernel
        flat.views(flat.vector.detach())["a"].copy_(start)
        step.begin({"a": Protected(kept, start.clone(), torch.zeros_like(kept))}, {}, {})
        for index, gradient in enumerate(gradients):
            flat.gradients()["a"].copy_(gradient)
            step.set_rate(1 / (1 + index))
            step()
        found.append((flat.views(flat.vector.detach())["a"].clone(), *step.state_by_name()["a"].values()))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    assert torch.equal(found[1][0][kept], start[kept])
    assert not torch.equal(found[1][0][~kept], start[~kept])


@pytest.mark.parametrize("optimizer", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_an_optimizer_without_a_custom_kernel_takes_its_own_steps(optimizer):
    pytest.importorskip("triton")
    flat = FlatParameters({"a": nn.Parameter(torch.ones(8))})
    step = OptimizerStep(flat, optimizer, flat.views, ())
    step()
    step.use_custom_kernel()
    assert not step.has_custom_kernel


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_a_custom_kernel_that_differs_from_the_optimizer_raises(monkeypatch, factor):
    kernels = pytest.importorskip("cps.training.cuda.optimizer_kernels")
    flat = FlatParameters({"a": nn.Parameter(torch.ones(8))})
    step = OptimizerStep(flat, cps.SGD(0.1), flat.views, ())
    flat.vector.grad.fill_(1.0)
    step()

    def make_other_step(optimizer, vector, free, value):
        def other_step():
            optimizer.param_groups[0]["lr"] = 0.1 * factor
            optimizer.step()

        return other_step

    monkeypatch.setattr(kernels, "make_kernel_step", make_other_step)
    with pytest.raises(RuntimeError, match="in the optimizer step") if factor != 1 else nullcontext():
        step.use_custom_kernel()
