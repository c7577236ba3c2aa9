"""The data sets of the recipes, read from folders in their usual layouts."""

import pickle

import numpy as np
import pytest
import torch

from cps.data import datasets
from cps.experiments.recipes import RECIPES
from samples import write_image_folder


def class_names(number):
    return [f"n{index:04d}" for index in range(number)]


def test_the_digits_are_those_of_scikit_learn_in_the_same_split():
    pytest.importorskip("sklearn")
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 1, 8, 8) / 16
    train, test = train_test_split(np.arange(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    for part, (found, names) in zip((train, test), datasets.read_digits(), strict=True):
        assert found.dtype == np.float32
        assert names.dtype == labels.dtype
        np.testing.assert_array_equal(found, images[part])
        np.testing.assert_array_equal(names, labels[part])


@pytest.fixture
def tiny_cifar(tmp_path, monkeypatch):
    """Write a data set in the layout of CIFAR-100, with two images of each class."""
    from torchvision.datasets import CIFAR100

    monkeypatch.setattr(CIFAR100, "_check_integrity", lambda self: True)
    folder = tmp_path / CIFAR100.base_folder
    folder.mkdir()
    names = [f"class {index}" for index in range(100)]
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": names}))
    monkeypatch.setattr(CIFAR100, "meta", {**CIFAR100.meta, "md5": None})
    draws = np.random.default_rng(0)
    for part in ("train", "test"):
        data = draws.integers(0, 256, (200, 3072), dtype=np.uint8)
        (folder / part).write_bytes(pickle.dumps({"data": data, "fine_labels": [*range(100), *range(100)]}))
    return tmp_path


def test_cifar_is_read_from_its_folder_as_bytes(tiny_cifar):
    (images, labels), _ = datasets.read_cifar100(tiny_cifar)
    assert images.shape == (200, 3, 32, 32)
    assert images.dtype == torch.uint8
    assert sorted(set(labels)) == list(range(100))
    scenario = RECIPES["cifar100-b50"]().scenario(tiny_cifar, 1993)
    assert [len(task.classes) for task in scenario] == [50, 10, 10, 10, 10, 10]
    assert RECIPES["cifar100-20"]().scenario(tiny_cifar, None)[3].classes == (15, 16, 17, 18, 19)


def test_the_error_for_missing_or_damaged_cifar_says_what_to_put_where(tmp_path):
    (tmp_path / "cifar-100-python").mkdir()
    with pytest.raises(ValueError, match="put the unpacked folder 'cifar-100-python' there"):
        datasets.read_cifar100(tmp_path)


def test_imagenet100_has_the_first_hundred_classes_of_the_papers_order(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "IMAGE_SIZE", 16)
    for part in ("train", "val"):
        write_image_folder(tmp_path / part, class_names(120), images=1)
    expected = {f"n{index:04d}" for index in np.random.RandomState(1993).permutation(120)[:100]}
    train, test = datasets.read_imagenet100(tmp_path)
    assert set(train.targets) == set(test.targets) == expected


def test_the_archive_of_cub_is_split_as_its_lists_say(tmp_path):
    write_image_folder(tmp_path / "CUB_200_2011" / "images", class_names(3), images=2)
    names = [f"n{index:04d}/{image}.png" for index in range(3) for image in range(2)]
    lines = {"images": names, "train_test_split": ["1", "0", "1", "1", "0", "1"]}
    for name, values in lines.items():
        text = "\n".join(f"{number} {value}" for number, value in enumerate(values, start=1))
        (tmp_path / "CUB_200_2011" / f"{name}.txt").write_text(text)
    train, test = datasets.read_cub200(tmp_path)
    assert [path.name for path in train.files] == ["0.png", "0.png", "1.png", "1.png"]
    assert test.targets == ["n0000", "n0002"]


def test_errors_name_missing_folders_and_weights_of_another_network(tmp_path):
    with pytest.raises(ValueError, match=r"no folder .*train.*--data"):
        datasets.read_image_folders(tmp_path)
