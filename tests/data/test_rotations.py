"""Rotations by 90 degrees and flips: the views of an image, and the outputs of a head for them."""

import pytest
import torch

import cps
from cps.data.rotations import View, average_views, check_rotations, class_logits, make_views
from cps.storage.settings_codec import decode

IMAGES = torch.arange(18.0).reshape(2, 1, 3, 3)


def test_a_view_is_a_flip_then_a_rotation():
    for rotation in range(4):
        assert torch.equal(View(rotation, False)(IMAGES), torch.rot90(IMAGES, rotation, (2, 3)))
        assert torch.equal(View(rotation, True)(IMAGES), torch.rot90(IMAGES.flip(-1), rotation, (2, 3)))


def test_a_view_never_shares_memory_with_the_images():
    for view in make_views(4, flips=True):
        view(IMAGES.clone()).zero_()
        images = IMAGES.clone()
        view(images).zero_()
        assert torch.equal(images, IMAGES)


def test_all_views_are_every_rotation_without_and_with_a_flip():
    assert make_views(1, flips=False) == [View(0, False)]
    assert make_views(4, flips=True) == [View(r, flip) for flip in (False, True) for r in range(4)]


def test_upright_images_are_unchanged():
    labels = torch.tensor([0, 1])
    images, outputs = cps.Upright()(IMAGES, labels, torch.zeros(2, 0))
    assert images is IMAGES
    assert outputs is labels


def test_rotations_at_once_show_every_rotation_as_its_own_output():
    images, outputs = cps.Rotations(at_once=True)(IMAGES, torch.tensor([0, 2]), torch.zeros(2, 0))
    assert outputs.tolist() == [0, 8, 1, 9, 2, 10, 3, 11]
    for rotation in range(4):
        assert torch.equal(images[2 * rotation : 2 * rotation + 2], View(rotation, False)(IMAGES))


def test_a_random_rotation_is_chosen_by_the_random_number_of_the_image():
    images, outputs = cps.Rotations()(IMAGES, torch.tensor([0, 2]), torch.tensor([[0.3], [0.99]]))
    assert outputs.tolist() == [1, 11]
    assert torch.equal(images[:1], View(1, False)(IMAGES[:1]))
    assert torch.equal(images[1:], View(3, False)(IMAGES[1:]))


def test_class_logits_read_each_view_by_the_outputs_of_its_rotation():
    views, draws = make_views(4, flips=True), torch.Generator().manual_seed(0)
    features = torch.randn(8, 5, 7, generator=draws)  # (views, images, features)
    weight, bias = torch.randn(12, 7, generator=draws), torch.randn(12, generator=draws)
    every = features @ weight.T + bias  # (views, images, 3 classes x 4 rotations)
    expected = torch.stack([every[index, :, view.rotation :: 4] for index, view in enumerate(views)]).mean(dim=0)
    assert torch.allclose(class_logits(features, views, weight, bias), expected, atol=1e-6)


def test_the_average_of_one_view_has_the_same_bits():
    values = torch.tensor([[0.1, float("-inf")]])
    assert torch.equal(average_views(values), values[0])
    assert average_views(torch.tensor([[1.0], [2.0]])).tolist() == [1.5]


def test_settings_of_old_files_are_read():
    assert decode({"type": "Upright", "mirrors": True}) == cps.Upright(flips=True)
    assert decode({"type": "Rotations", "at_once": True, "mirrors": True}) == cps.Rotations(True, flips=True)


@pytest.mark.parametrize(
    ("shape", "num_rotations", "flips", "message"),
    [
        ((3, 8, 8), 2, False, "num_rotations must be 1 or 4, got 2"),
        ((3, 8, 9), 4, False, r"only square images .* can be rotated, got shape \(3, 8, 9\)"),
        ((10,), 4, False, "only square images"),
        ((10,), 1, True, r"only images .* can be flipped, got shape \(10,\)"),
    ],
)
def test_images_that_cannot_be_rotated_or_flipped_raise(shape, num_rotations, flips, message):
    with pytest.raises(ValueError, match=message):
        check_rotations(shape, num_rotations, flips)
    check_rotations((3, 8, 8), 4, True)
