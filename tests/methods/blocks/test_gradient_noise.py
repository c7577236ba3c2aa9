"""Noise of gradients."""

import pytest
import torch

from cps.methods.blocks.gradient_noise import GradientNoise


@pytest.mark.parametrize(("epoch", "batch_size"), [(0, 1), (9, 1), (0, 16)])
def test_the_noise_has_the_variance_of_the_schedule_and_is_that_of_a_sum_over_the_batch(epoch, batch_size):
    parameter = torch.nn.Parameter(torch.zeros(200, 100))
    parameter.grad = torch.full_like(parameter, 5)
    draws = torch.Generator().manual_seed(0)
    GradientNoise().add_to([parameter], epoch, draws, batch_size=batch_size)
    noise = (parameter.grad - 5) * batch_size
    assert noise.var().item() == pytest.approx(0.3 / (1 + epoch) ** 0.55, rel=0.05)
    assert abs(noise.mean().item()) < 0.02


def test_parameters_without_gradients_get_none():
    parameter = torch.nn.Parameter(torch.zeros(2))
    GradientNoise().add_to([parameter], 0, torch.Generator())
    assert parameter.grad is None


def test_a_negative_scale_raises():
    with pytest.raises(ValueError, match="scale of GradientNoise must be 0 or more"):
        GradientNoise(-0.1)
