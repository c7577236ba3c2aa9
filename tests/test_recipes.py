"""Recipes are the paper's settings, and run from a folder of data."""

import pickle

import numpy as np
import pytest

from cps.recipes import RECIPES, read_cifar100


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_what_its_name_says_and_can_be_shortened(name):
    recipe = RECIPES[name]()
    assert recipe.name == name
    short = recipe.scaled(0.1)
    assert short.train.epochs == max(1, round(0.1 * recipe.train.epochs))
    assert short.train.optimizer == recipe.train.optimizer
    assert set(recipe.learner_settings()) <= {
        "train", "retrain", "pruner", "rounds", "selectors", "augment", "normalize", "prune_images"
    }  # fmt: skip


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
    (images, labels), _ = read_cifar100(tiny_cifar)
    assert images.shape == (200, 3, 32, 32)
    assert str(images.dtype) == "torch.uint8"
    assert sorted(set(labels)) == list(range(100))
    scenario = RECIPES["cifar100-b50"]().scenario(tiny_cifar, 1993)
    assert [len(task.classes) for task in scenario] == [50, 10, 10, 10, 10, 10]
    assert RECIPES["cifar100-20"]().scenario(tiny_cifar, None)[3].classes == (15, 16, 17, 18, 19)


def test_missing_or_damaged_data_says_what_to_put_where(tmp_path):
    (tmp_path / "cifar-100-python").mkdir()
    with pytest.raises(ValueError, match="put the unpacked folder 'cifar-100-python' there"):
        read_cifar100(tmp_path)
