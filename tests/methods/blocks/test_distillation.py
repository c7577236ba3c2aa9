"""Distillation terms, compared with cases worked by hand."""

import pytest
import torch

from cps.methods.blocks.distillation import distillation_loss


@pytest.mark.parametrize(("student", "expected"), [((0.0, 0.0), 0.6931), ((1.0, 0.0), 0.6085)])
def test_distillation_with_temperature_two_is_as_worked_by_hand(student, expected):
    """A teacher with logits (2, 0) has targets 0.7311 and 0.2689."""
    loss = distillation_loss(torch.tensor([student]), torch.tensor([[2.0, 0.0]]), 2.0)
    assert loss.item() == pytest.approx(expected, abs=1e-4)


def test_a_student_like_its_teacher_has_no_gradient():
    logits = torch.randn(5, 3, requires_grad=True)
    distillation_loss(logits, logits.detach()).backward()
    assert logits.grad.abs().max() < 1e-7
