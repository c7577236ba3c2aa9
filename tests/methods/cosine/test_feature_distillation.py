"""Distances of features and maps, compared with cases worked by hand."""

import math

import pytest
import torch

from cps.methods.cosine.feature_distillation import angular_distance, channel_distance, pooled_distance

DRAWS = torch.Generator().manual_seed(0)
MAPS = [torch.randn(3, 4, 5, 5, generator=DRAWS), torch.randn(3, 6, 2, 3, generator=DRAWS)]
OTHERS = [torch.randn(each.shape, generator=DRAWS) for each in MAPS]


def one_pixel(row, column, channels=1):
    maps = torch.zeros(1, channels, 2, 2)
    maps[:, :, row, column] = 1
    return maps


def test_angles_do_not_depend_on_lengths():
    features = torch.tensor([[2.0, 0.0], [1.0, 1.0]])
    teacher = torch.tensor([[0.0, 5.0], [3.0, 3.0]])
    assert angular_distance(features, teacher).item() == pytest.approx(0.5)


def test_pooled_maps_with_one_pixel_at_opposite_corners_are_sqrt_two_apart():
    assert pooled_distance([one_pixel(0, 0)], [one_pixel(1, 1)]).item() == pytest.approx(math.sqrt(2))
    assert pooled_distance([one_pixel(0, 0)], [one_pixel(0, 1)]).item() == pytest.approx(1)


def test_pooled_maps_do_not_see_signs_or_scale():
    assert pooled_distance(MAPS, [-3 * each for each in MAPS]).item() == pytest.approx(0, abs=1e-6)
    assert pooled_distance(MAPS, OTHERS).item() > 0.1


def test_pooling_sums_squares_over_width_and_over_height():
    distances = []
    for one, other in zip(MAPS, OTHERS, strict=True):
        pooled = []
        for maps in (one, other):
            rows = [torch.cat([image.pow(2).sum(2).flatten(), image.pow(2).sum(1).flatten()]) for image in maps]
            pooled.append(torch.stack([row / row.pow(2).sum().sqrt() for row in rows]))
        distances.append((pooled[0] - pooled[1]).pow(2).sum(dim=1).sqrt().mean())
    torch.testing.assert_close(pooled_distance(MAPS, OTHERS), torch.stack(distances).mean())


def test_with_equal_importances_the_distance_of_channels_is_that_of_their_pixels():
    ones = [torch.ones(each.shape[1]) for each in MAPS]
    distances = []
    for one, other in zip(MAPS, OTHERS, strict=True):
        pixels = [maps.pow(2) / maps.pow(2).flatten(2).norm(dim=2)[:, :, None, None] for maps in (one, other)]
        distances.append((pixels[0] - pixels[1]).flatten(2).norm(dim=2).mean())
    torch.testing.assert_close(channel_distance(MAPS, OTHERS, ones), torch.stack(distances).mean())


def test_a_channel_without_importance_may_move_freely():
    moved = torch.cat([one_pixel(0, 0), one_pixel(1, 1)], dim=1)
    same = one_pixel(0, 0, channels=2)
    assert channel_distance([moved], [same], [torch.tensor([1.0, 0.0])]).item() == pytest.approx(0)
    assert channel_distance([moved], [same], [torch.tensor([0.5, 1.5])]).item() == pytest.approx(1.5 * math.sqrt(2) / 2)


@pytest.mark.parametrize("weights", [None, [torch.ones(4), torch.ones(6)]])
def test_a_model_like_its_teacher_has_neither_distance_nor_gradient(weights):
    maps = [each.clone().requires_grad_() for each in MAPS]
    distance = pooled_distance(maps, MAPS) if weights is None else channel_distance(maps, MAPS, weights)
    distance.backward()
    assert distance.item() == pytest.approx(0, abs=1e-6)
    assert all(each.grad.abs().max() < 1e-6 for each in maps)
