"""Weights by the effective number of images."""

import pytest
import torch

from cps.methods.expansion.class_weights import effective_number_weights


@pytest.mark.parametrize(
    ("beta", "old", "new", "expected"),
    [(0.97, (50, 20), (10, 500), (1.0997, 0.5017)), (0.98, (10, 200), (10, 500), (1.0089, 0.9911))],
)
def test_weights_are_as_worked_by_hand(beta, old, new, expected):
    weights = effective_number_weights([old[1]] * old[0] + [new[1]] * new[0], beta)
    assert weights[0].item() == pytest.approx(expected[0], abs=1e-4)
    assert weights[-1].item() == pytest.approx(expected[1], abs=1e-4)
    assert weights.mean().item() == pytest.approx(1)


def test_equal_counts_have_weights_of_one():
    assert torch.equal(effective_number_weights([30] * 7, 0.96), torch.ones(7))
