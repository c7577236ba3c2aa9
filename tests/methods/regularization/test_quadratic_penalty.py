"""Quadratic penalties and path integrals, compared with cases worked by hand."""

import pytest
import torch
from torch import nn

import cps
from cps.methods.regularization.importance import flat_parameters
from cps.methods.regularization.quadratic_penalty import PathIntegral, Penalized
from cps.network.classifier import Classifier
from samples import conv_net


def one_weight(value=0.0):
    """Return a model whose only logit, for the input 1, is its weight theta."""
    model = Classifier(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    nn.init.constant_(model.backbone.weight, value)
    nn.init.constant_(model.head.weight, 1.0)
    model.head.requires_grad_(False)
    return model


def half_square(features, logits, labels):
    """L = (theta - 1)^2 / 2."""
    return (logits - 1).square().mean() / 2


def take_step(objective, optimizer, loss=half_square):
    optimizer.zero_grad()
    value = objective(torch.ones(1, 1), torch.zeros(1).long(), loss)
    value.backward()
    objective.before_step()
    optimizer.step()
    objective.after_step()
    return value.item()


def test_the_penalty_and_its_gradient_are_zero_at_the_anchor_and_grow_with_the_square_of_the_distance():
    model = one_weight(0.5)
    objective = Penalized(model, 0, 3.0, torch.tensor([2.0]))
    penalty = objective.penalty()
    penalty.backward()
    assert penalty.item() == model.backbone.weight.grad.item() == 0
    nn.init.constant_(model.backbone.weight, 0.9)
    assert objective.penalty().item() == pytest.approx(3 * 2 * 0.16)


def test_the_loss_is_that_of_the_new_classes_plus_the_penalty():
    torch.manual_seed(0)
    model, pixels, labels = Classifier(conv_net(), nn.Linear(12, 5)), torch.randn(6, 2, 6, 6), torch.arange(6) % 2 + 3
    weights = torch.rand(flat_parameters(model.backbone).numel())
    objective = Penalized(model.eval(), 3, 0.5, weights, torch.zeros_like(weights))
    expected = nn.functional.cross_entropy(model(pixels)[:, 3:], labels - 3)
    expected = expected + 0.5 * (weights * flat_parameters(model.backbone).square()).sum()
    torch.testing.assert_close(objective(pixels, labels, cps.CrossEntropy()), expected)


def test_the_path_of_one_step_is_as_worked_by_hand():
    """The gradient at 0 is -1; a step of 0.1 has omega = 0.1, and Omega = 0.1 / (0.1^2 + 0.1) = 0.909."""
    objective = PathIntegral(one_weight(), 0, 1.0)
    take_step(objective, torch.optim.SGD(objective.student.backbone.parameters(), 0.1))
    assert objective.path.item() == pytest.approx(0.1)
    moved = flat_parameters(objective.student.backbone) - objective.anchor
    assert (objective.path / (moved.square() + 0.1)).item() == pytest.approx(0.909, abs=1e-3)


def test_with_small_steps_the_path_sums_to_the_decrease_of_the_loss():
    objective = PathIntegral(one_weight(), 0, 1.0)
    optimizer = torch.optim.SGD(objective.student.backbone.parameters(), 1e-3, momentum=0.9)
    losses = [take_step(objective, optimizer) for _ in range(200)]
    assert objective.path.item() == pytest.approx(losses[0] - losses[-1], rel=0.01)


def test_the_path_does_not_contain_the_gradient_of_the_penalty():
    """With a penalty of 5 (theta - 2)^2 the step from 0 goes to 0.1 (1 + 20) = 2.1, of which the loss wants -1 each."""
    objective = PathIntegral(one_weight(), 0, 5.0, torch.ones(1))
    objective.anchor.fill_(2.0)
    take_step(objective, torch.optim.SGD(objective.student.backbone.parameters(), 0.1))
    assert objective.student.backbone.weight.item() == pytest.approx(2.1)
    assert objective.path.item() == pytest.approx(2.1)


def test_a_step_that_is_skipped_for_infinite_gradients_adds_nothing():
    objective = PathIntegral(one_weight(), 0, 1.0)
    objective.student.backbone.weight.grad = torch.full((1, 1), torch.inf)
    objective.before_step()
    objective.after_step()
    assert objective.path.item() == 0
