"""Tasks, and data sets split into scenarios by class."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

import cps
from samples import ListDataset

LABELS = np.repeat(np.arange(10), 6)
IMAGES = np.arange(60, dtype=np.float32)[:, None].repeat(3, axis=1)


def test_every_class_is_in_exactly_one_task():
    scenario = cps.split_by_class((IMAGES, LABELS), (IMAGES, LABELS), sizes=2)
    assert [task.classes for task in scenario] == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]
    for task in scenario:
        assert set(task.train[1]) == set(task.test[1]) == set(task.classes)
        assert all(LABELS[int(image[0])] == label for image, label in zip(*task.train, strict=True))


def test_sizes_may_differ_between_tasks():
    scenario = cps.split_by_class((IMAGES, LABELS), sizes=[5, 1, 1, 1, 1, 1])
    assert [len(task.classes) for task in scenario] == [5, 1, 1, 1, 1, 1]


def test_the_class_order_of_a_seed_is_that_of_icarl():
    scenario = cps.split_by_class((IMAGES, LABELS), sizes=5, order=1993)
    np.random.seed(1993)
    expected = np.random.permutation(10).tolist()
    assert [name for task in scenario for name in task.classes] == expected
    assert scenario.order == 1993


def test_a_given_class_order_must_contain_every_class():
    order = list(range(9, -1, -1))
    assert cps.split_by_class((IMAGES, LABELS), sizes=5, order=order)[0].classes == (9, 8, 7, 6, 5)
    with pytest.raises(ValueError, match="every class"):
        cps.split_by_class((IMAGES, LABELS), sizes=5, order=[1, 2])


@pytest.mark.parametrize("order", [torch.arange(9, -1, -1), np.arange(9, -1, -1)])
def test_a_class_order_may_be_a_tensor_or_an_array(order):
    assert cps.split_by_class((IMAGES, LABELS), sizes=2, order=order)[0].classes == (9, 8)
    assert cps.split_by_class((IMAGES, LABELS), sizes=2, order=np.int64(1993)).order == 1993


def test_validation_images_come_from_each_class_and_are_not_trained_on():
    task = cps.split_by_class((IMAGES, LABELS), sizes=2, validation=0.3)[0]
    train, val = set(task.train[0][:, 0].tolist()), set(task.val[0][:, 0].tolist())
    assert train | val == set(range(12))
    assert not train & val
    assert sorted(task.val[1]) == [0, 0, 1, 1]


@pytest.mark.parametrize("sizes", [0, [3, 3], [5, 5, 0], [-1, 11]])
def test_sizes_that_do_not_fit_raise(sizes):
    with pytest.raises(ValueError, match="size"):
        cps.split_by_class((IMAGES, LABELS), sizes=sizes)


@pytest.mark.parametrize("validation", [-0.1, 1.0])
def test_validation_must_be_a_fraction(validation):
    with pytest.raises(ValueError, match=rf"validation must be in \[0, 1\), got {validation}"):
        cps.split_by_class((IMAGES, LABELS), sizes=5, validation=validation)


class UnlabelledPictures(Dataset):
    """A data set of grey PIL images with named classes, without `targets`: labels are known only by reading."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return Image.fromarray(np.full((5, 4), index, dtype=np.uint8)), ["cat", "dog"][index % 2]


def test_a_data_set_without_targets_is_split_by_reading_it():
    scenario = cps.split_by_class(UnlabelledPictures(), sizes=1)
    assert [task.classes for task in scenario] == [("cat",), ("dog",)]
    assert [label for _, label in scenario[1].train] == ["dog"] * 4


def test_labels_are_those_after_the_target_transform():
    class Shifted(ListDataset):
        def __init__(self):
            super().__init__(IMAGES, LABELS.tolist())
            self.targets = self.labels
            self.target_transform = lambda label: label + 100

        def __getitem__(self, index):
            return self.images[index], self.labels[index] + 100

    assert cps.split_by_class(Shifted(), sizes=5)[0].classes == (100, 101, 102, 103, 104)


def test_lists_of_pil_images_are_split_as_tensors_with_channels_first():
    pictures = [Image.fromarray(np.full((5, 4, 3), index, dtype=np.uint8)) for index in range(4)]
    assert cps.split_by_class((pictures, [0, 1, 0, 1]), sizes=1)[1].train[0].shape == (2, 3, 5, 4)


def test_a_task_is_described_in_one_line_without_its_images():
    images = torch.rand(6, 1, 4, 4)
    task = cps.Task(["cat", "dog"], train=(images, [0, 1] * 3), test=ListDataset(images[:4], [0, 1] * 2))
    assert repr(task) == "Task(('cat', 'dog'), train=6 images, test=4 images)"
    many = cps.Task(range(100), train=(images, range(6)))
    assert repr(many) == "Task((0, 1, 2, 3, 4, 5, ...), train=6 images)"
