"""Losses of similarities, compared with cases worked by hand."""

import pytest
import torch
import torch.nn.functional as F

from cps.methods.cosine.similarity_losses import margin_ranking_loss, nca_loss, released_nca_loss

SIMILARITIES = torch.tensor([[0.9, 0.5, 0.1]])


@pytest.mark.parametrize(("label", "paper", "released"), [(0, 0.7130, 0.7513), (1, 1.3711, 1.2958)])
def test_the_nca_loss_is_as_worked_by_hand(label, paper, released):
    """For label 0: -(0.9 - 0.6) + log(exp 0.5 + exp 0.1), and as released -0 + log(1 + exp -0.4 + exp -0.8)."""
    labels = torch.tensor([label])
    assert nca_loss(SIMILARITIES, labels).item() == pytest.approx(paper, abs=1e-4)
    assert released_nca_loss(SIMILARITIES, labels).item() == pytest.approx(released, abs=1e-4)


def test_an_image_with_the_margin_has_no_loss_and_no_gradient():
    similarities = torch.tensor([[0.9, 0.2]], requires_grad=True)  # 0.7 apart
    loss = nca_loss(similarities, torch.tensor([0]), 5.0)
    loss.backward()
    assert loss.item() == 0
    assert similarities.grad.abs().max() == 0
    assert nca_loss(similarities, torch.tensor([0]), 5.0, margin=0.8).item() == pytest.approx(0.5, abs=1e-5)


def test_with_a_single_class_the_nca_loss_is_zero_and_finite():
    similarities = torch.tensor([[0.3], [-1.0]], requires_grad=True)
    loss = nca_loss(similarities, torch.tensor([0, 0]))
    loss.backward()
    assert loss.item() == 0
    assert similarities.grad.isfinite().all()


def test_the_released_loss_is_the_same_for_squared_distances_of_scaled_unit_vectors():
    """The published code: similarities -|3 a - 3 b|^2, the largest subtracted, the label as exp(0) in the sum."""
    draws = torch.Generator().manual_seed(0)
    features, vectors = (F.normalize(torch.randn(number, 4, generator=draws), dim=1) for number in (6, 5))
    labels = torch.arange(6) % 5
    distances = -torch.cdist(3 * features, 3 * vectors).square()
    shifted = distances - distances.amax(dim=1, keepdim=True)
    own = shifted[torch.arange(6), labels]
    sums = torch.stack([row.exp().sum() - row[label].exp() + 1 for row, label in zip(shifted, labels, strict=True)])
    torch.testing.assert_close(released_nca_loss(18 * features @ vectors.T, labels), (sums.log() - own).mean())


def test_the_margin_ranking_loss_is_as_worked_by_hand():
    """The class of the old image has 0.6; 0.5 - 0.6 + 0.4 = 0.3 and 0.5 - 0.6 + 0.2 = 0.1 have the mean 0.2."""
    similarities = torch.tensor([[0.6, 0.9, 0.1, 0.4, 0.2], [0.1, 0.1, 0.0, 0.9, 0.0]])
    labels = torch.tensor([0, 3])  # the second is an image of a new class, which does not count
    assert margin_ranking_loss(similarities, labels, 2).item() == pytest.approx(0.2)
    assert margin_ranking_loss(similarities, labels, 2, rivals=9).item() == pytest.approx((0.3 + 0.1) / 3)


def test_without_old_images_there_is_no_ranking_loss():
    similarities = torch.rand(4, 3, requires_grad=True)
    loss = margin_ranking_loss(similarities, torch.full((4,), 2), 2)
    loss.backward()
    assert loss.item() == 0
    assert similarities.grad.abs().max() == 0
