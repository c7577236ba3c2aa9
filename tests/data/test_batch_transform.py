"""A batch is augmented, rotated and normalised, each with its own random numbers."""

import pytest
import torch

import cps
from cps.data.batch_transform import BatchTransform
from cps.data.normalize import Prepare


def test_the_steps_run_in_order_with_their_own_random_numbers():
    augment, rotations = cps.PadCrop(1), cps.Rotations()
    prepare = Prepare(cps.Normalize((0.5,), (0.2,)))
    transform = BatchTransform(prepare, augment, rotations)
    draws = torch.Generator().manual_seed(0)
    images, labels = torch.rand(6, 1, 4, 4, generator=draws), torch.arange(6) % 2
    uniform = torch.rand(6, transform.draws, generator=draws)
    pixels, outputs = transform(images, labels, uniform)
    expected, expected_outputs = rotations(augment(images, uniform[:, :2]), labels, uniform[:, 2:])
    assert transform.draws == 3
    assert torch.equal(pixels, prepare(expected))
    assert torch.equal(outputs, expected_outputs)


def test_without_settings_only_bytes_are_scaled():
    images, labels = torch.full((2, 1, 3, 3), 255, dtype=torch.uint8), torch.tensor([0, 1])
    pixels, outputs = BatchTransform()(images, labels, torch.zeros(2, 0))
    assert torch.equal(pixels, torch.ones(2, 1, 3, 3))
    assert torch.equal(outputs, labels)


def test_an_augmentation_without_draws_raises():
    with pytest.raises(TypeError, match="an augmentation must be a function .* has no such attribute"):
        BatchTransform(augment=lambda images, uniform: images)
