"""Augmentations compared with torchvision and with cases worked by hand."""

import pytest
import torch
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as tv

import cps


def draw_uniform(number, draws):
    return torch.rand(number, draws, generator=torch.Generator().manual_seed(0))


def picture(number=1, height=20, width=20):
    """Return smooth colour images as bytes."""
    down, across = torch.meshgrid(torch.linspace(0, 3, height), torch.linspace(0, 2, width), indexing="ij")
    channels = [torch.sin(down + shift) * torch.cos(across * (shift + 1)) for shift in range(3)]
    return ((torch.stack(channels) + 1) * 127).to(torch.uint8).repeat(number, 1, 1, 1)


def test_pad_crop_shifts_each_image_by_its_own_random_numbers():
    images = torch.arange(1, 401, dtype=torch.uint8).reshape(25, 1, 4, 4).clamp_min(1)
    shifted = cps.PadCrop(1)(images, draw_uniform(25, 2))
    padded = torch.nn.functional.pad(images, [1] * 4)
    found = set()
    for index, image in enumerate(shifted):
        places = [
            (top, left)
            for top in range(3)
            for left in range(3)
            if torch.equal(padded[index, :, top : top + 4, left : left + 4], image)
        ]
        assert places
        found.update(places)
    assert len(found) > 3


def test_flip_flips_about_half_of_the_images():
    images = torch.rand(200, 1, 3, 3)
    result = cps.Flip()(images, draw_uniform(200, 1))
    flipped = (result == images.flip(-1)).flatten(1).all(dim=1)
    kept = (result == images).flatten(1).all(dim=1)
    assert (flipped | kept).all()
    assert 60 < int(flipped.sum()) < 140


def test_resized_crop_takes_the_part_that_its_random_numbers_say():
    images = picture()
    assert torch.equal(cps.ResizedCrop((1.0, 1.0), (1.0, 1.0))(images, draw_uniform(1, 4)), images)
    quarter = cps.ResizedCrop((0.25, 0.25), (1.0, 1.0))
    corner = quarter(images, torch.tensor([[0.5, 0.5, 0.0, 1.0]]))  # bottom left
    expected = tv.resize(images[:, :, 10:, :10], [20, 20], antialias=False)
    assert (corner.int() - expected.int())[:, :, 2:-2, 2:-2].abs().max() <= 3
    plain = torch.full((50, 3, 9, 7), 200, dtype=torch.uint8)
    assert torch.equal(cps.ResizedCrop()(plain, draw_uniform(50, 4)), plain)
    several = cps.ResizedCrop()(picture(20), draw_uniform(20, 4))
    assert len({image.numpy().tobytes() for image in several}) == 20


@pytest.mark.parametrize("angle", [-90, -25, 0, 40, 90])
def test_rotate_agrees_with_torchvision(angle):
    images = picture()
    rotated = cps.Rotate(180)(images, torch.tensor([[0.5 + angle / 360]]))
    expected = tv.rotate(images, angle, InterpolationMode.BILINEAR)
    assert (rotated.int() - expected.int()).abs()[:, :, 5:-5, 5:-5].max() <= 3


def test_colour_agrees_with_torchvision():
    images, factors = picture(), (0.8, 1.3, 0.5)
    uniform = torch.tensor([[0.5 + (factor - 1) for factor in factors]])  # with strengths of one half
    expected = tv.adjust_brightness(images / 255, factors[0])
    expected = tv.adjust_saturation(tv.adjust_contrast(expected, factors[1]), factors[2])
    floats = cps.Colour(0.5, 0.5, 0.5)(images / 255, uniform)
    assert (floats - expected).abs().max() <= 2e-3  # torchvision's colour weights have four digits
    changed = cps.Colour(0.5, 0.5, 0.5)(images, uniform)
    assert changed.dtype == torch.uint8
    assert (255 * floats - changed).abs().max() <= 1
    assert torch.equal(cps.Colour()(images, torch.full((1, 3), 0.5)), images)
    grey = images[:, :1]
    assert cps.Colour()(grey, draw_uniform(1, 3)).shape == grey.shape


def test_a_chain_gives_each_step_its_own_random_numbers():
    chain, images = cps.Chain((cps.PadCrop(2), cps.Flip())), picture(5)
    uniform = draw_uniform(5, 3)
    assert chain.draws == 3
    assert torch.equal(chain(images, uniform), cps.Flip()(cps.PadCrop(2)(images, uniform[:, :2]), uniform[:, 2:]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cps.PadCrop(-1), "padding of PadCrop must be a number of pixels, 0 or more, got -1"),
        (lambda: cps.ResizedCrop((0.0, 1.0)), r"area of ResizedCrop must be a range within \(0, 1\], got \(0.0, 1.0\)"),
        (lambda: cps.ResizedCrop((0.5, 0.4)), r"area of ResizedCrop must be a range .* got \(0.5, 0.4\)"),
        (lambda: cps.ResizedCrop(shape=(0.0, 1.0)), "shape of ResizedCrop must be a range above 0, got"),
        (lambda: cps.Colour(contrast=2), r"contrast of Colour must be in \[0, 1\], got 2"),
    ],
)
def test_settings_out_of_range_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()
