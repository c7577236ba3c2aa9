"""Classes and labels of a task that cannot be learned or stored."""

import numpy as np
import pytest
import torch

import cps
from cps.data.images import as_images
from samples import make_task

IMAGES, LABELS = make_task(10).train


@pytest.mark.parametrize("names", [[True, False], [0.5, 1.5], [(0, 1), (0, 2)], [None, "a"], [b"a", b"b"]], ids=str)
def test_class_names_must_be_strings_or_integers(names):
    with pytest.raises(TypeError, match="strings or ints"):
        cps.Task(names, train=(IMAGES, [names[0], names[1]] * 12))


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ("ab", "classes must be a list of names"),
        (None, "labels and classes must be lists of names or numbers, got None"),
    ],
)
def test_classes_must_be_a_list_of_names(classes, message):
    with pytest.raises(TypeError, match=message):
        cps.Task(classes, train=(IMAGES, LABELS))


def test_test_images_of_a_class_without_training_images_warn():
    images = torch.rand(10, 1, 8, 8)
    with pytest.warns(UserWarning, match="class 9 of the test data has no training image"):
        cps.split_by_class((images, [0, 1] * 5), (images, [0, 9] * 5), sizes=np.int64(1))


def test_two_images_are_not_a_pair_of_images_and_labels():
    assert as_images((torch.rand(2, 3, 6, 6), torch.rand(2, 3, 6, 6))).shape == (2, 2, 3, 6, 6)
    assert as_images((torch.rand(5), torch.rand(5))).shape == (2, 5)
