"""Images of any form become one tensor. Images that raise: tests/network/test_input_checks.py."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

import cps
from cps.data.images import as_images, square_size
from samples import ListDataset, make_task


def test_pil_images_become_bytes_with_channels_first():
    grey = [Image.fromarray(np.full((5, 4), index, dtype=np.uint8)) for index in range(3)]
    assert as_images(grey).shape == (3, 1, 5, 4)
    assert as_images(grey)[:, 0, 0, 0].tolist() == [0, 1, 2]
    assert as_images(Image.new("RGB", (4, 5))).shape == (1, 3, 5, 4)


def test_a_data_set_gives_its_images():
    images = torch.rand(4, 1, 5, 4)
    assert torch.equal(as_images(TensorDataset(images, torch.zeros(4))), images)
    pictures = [Image.fromarray(np.full((5, 4), index, dtype=np.uint8)) for index in range(8)]
    assert as_images(ListDataset(pictures, ["cat", "dog"] * 4)).shape == (8, 1, 5, 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_floats_of_any_precision_become_float32(dtype):
    assert as_images(torch.ones(2, 1, 3, 3, dtype=dtype)).dtype == torch.float32
    assert as_images(torch.ones(2, 1, 3, 3, dtype=torch.uint8)).dtype == torch.uint8


def test_arrays_may_be_reversed_read_only_or_of_another_byte_order():
    array = np.arange(8, dtype=">f4").reshape(2, 1, 2, 2)
    array.flags.writeable = False
    assert as_images(array[::-1])[0].flatten().tolist() == [4, 5, 6, 7]


def test_images_may_be_half_precision_or_reversed_arrays(make_learner):
    images, labels = make_task(0).train
    learner = make_learner()
    learner.learn(cps.Task([0, 1], train=(images.half(), labels)))
    assert len(learner.predict(images.numpy()[::-1]).classes) == len(labels)


def test_only_square_colour_images_have_a_square_size():
    assert square_size((3, 8, 8)) == 8
    assert [square_size(shape) for shape in (None, (1, 8, 8), (3, 8, 9), (3, 8))] == [None] * 4
