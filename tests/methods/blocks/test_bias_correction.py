"""Bias correction of the logits of tasks."""

import pytest
import torch

from cps.methods.blocks.bias_correction import BiasCorrection


def test_probabilities_are_as_worked_by_hand():
    correction = BiasCorrection([1, 1])
    with torch.no_grad():
        correction.alpha[1], correction.beta[1] = 0.5, -1
    probabilities = correction(torch.tensor([[2.0, 2.0]])).softmax(dim=1)
    assert probabilities[0].tolist() == pytest.approx([0.8808, 0.1192], abs=1e-4)


def test_at_first_nothing_is_corrected():
    logits = torch.randn(3, 6)
    assert torch.equal(BiasCorrection([3, 1, 2])(logits), logits)


def test_each_task_has_its_numbers_and_logits_of_fewer_tasks_can_be_corrected():
    correction = BiasCorrection([2, 1])
    with torch.no_grad():
        correction.alpha.copy_(torch.tensor([2.0, 3.0]))
        correction.beta.copy_(torch.tensor([1.0, -1.0]))
    assert correction(torch.ones(1, 3)).tolist() == [[3, 3, 2]]
    assert correction(torch.ones(1, 2)).tolist() == [[3, 3]]
