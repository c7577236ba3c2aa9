"""The scatter of each class by itself."""

import pytest
import torch

from cps.closed_form.factors import ClassFactors
from cps.closed_form.sums import Sums


def draw(images, classes=3, dims=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(images) % classes
    return torch.randn(images, dims, generator=generator).double() + labels[:, None], labels


@pytest.mark.parametrize("images", [3, 7, 60])
def test_factors_have_the_scatter_of_the_sums_in_few_rows(images):
    features, labels = draw(images)
    sums = Sums.of([(features, labels)], 3)
    factors = ClassFactors.of([(features, labels)], sums.means)
    torch.testing.assert_close(factors.scatter, sums.scatter)
    assert len(factors.rows) == min(images - 3, 3 * 6)  # n centred images have n - 1 dimensions


def test_factors_without_a_class_are_those_of_the_other_images():
    features, labels = draw(20)
    sums = Sums.of([(features, labels)], 3)
    left = ClassFactors.of([(features, labels)], sums.means).without_class(1)
    stay = labels != 1
    expected = Sums.of([(features[stay], labels[stay] // 2)], 2)
    torch.testing.assert_close(left.scatter, expected.scatter)
    assert left.classes.unique().tolist() == [0, 1]


def test_grown_factors_are_those_of_all_images_and_do_not_hold_single_images():
    features, labels = draw(24)
    halves = [(features[:9], labels[:9]), (features[9:], labels[9:])]
    sums = [Sums.of([half], 3) for half in halves]
    parts = [ClassFactors.of([half], each.means) for half, each in zip(halves, sums, strict=True)]
    grown = parts[0].grown(parts[1], *sums)
    together = ClassFactors.of([(features, labels)], (sums[0] + sums[1]).means)
    torch.testing.assert_close(grown.rows.abs(), together.rows.abs())  # triangular matrices differ by signs only
    assert torch.equal(grown.classes, together.classes)


def test_images_that_are_all_alike_have_no_rows():
    factors = ClassFactors.of([(torch.ones(4, 5), torch.zeros(4, dtype=torch.long))], torch.ones(1, 5).double())
    assert factors.rows.shape == (0, 5)
    assert torch.equal(factors.scatter, torch.zeros(5, 5).double())
