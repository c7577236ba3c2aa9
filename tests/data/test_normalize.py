"""Scaling and normalisation of pixels."""

import pytest
import torch

import cps
from cps.data.normalize import Prepare, as_floats, image_range, is_pixel_range


def test_bytes_are_scaled_and_floats_are_copied():
    assert as_floats(torch.tensor([[0, 51, 255]], dtype=torch.uint8)).tolist() == [[0, 0.20000000298023224, 1]]
    images = torch.rand(2, 3)
    assert torch.equal(as_floats(images), images)
    assert as_floats(images).data_ptr() != images.data_ptr()


@pytest.mark.parametrize("shape", [(4, 2), (4, 2, 5), (4, 2, 3, 3)])
def test_normalisation_is_per_channel_whatever_the_rank(shape):
    images, normalize = torch.rand(shape), cps.Normalize((0.5, 0.1), (0.2, 0.4))
    expected = torch.stack([(images[:, 0] - 0.5) / 0.2, (images[:, 1] - 0.1) / 0.4], dim=1)
    assert torch.allclose(normalize(images), expected)
    assert torch.equal(normalize.as_layer(images.device)(images), normalize(images))
    assert torch.equal(Prepare(normalize)(images), normalize(images))
    assert Prepare(normalize, torch.float64)(images).dtype == torch.float64


def test_the_range_of_bytes_is_that_of_pixels():
    assert image_range(torch.full((1, 3), 7, dtype=torch.uint8)) == (0.0, 1.0)
    assert image_range(torch.tensor([[-1.0, 3.0]])) == (-1.0, 3.0)
    assert is_pixel_range(0.0, 1.0)
    assert not is_pixel_range(-0.1, 1.0)
    assert not is_pixel_range(0.0, 1.5)


def test_wrong_numbers_of_channels_and_zero_deviations_raise():
    with pytest.raises(ValueError, match="expected images of 3 channels to normalise, got 1"):
        cps.Normalize((0.5,) * 3, (0.2,) * 3)(torch.rand(2, 1, 4, 4))
    for mean, std in (((0.5,), (0.2, 0.2)), ((0.5,), (0.0,))):
        with pytest.raises(ValueError, match="as many means as standard deviations"):
            cps.Normalize(mean, std)
