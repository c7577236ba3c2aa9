"""Recipes are the paper's settings, and run from a folder of data."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import cps
from cps.config import SETTINGS
from cps.data import datasets as sources
from cps.data.datasets import read_cifar100
from cps.experiments.recipes import RECIPES
from cps.experiments.run import Run
from cps.network.backbones import large_resnet18
from cps.storage.lock import LockedError, locked


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_what_its_name_says_and_can_be_shortened(name):
    recipe = RECIPES[name]()
    assert recipe.name == name
    short = recipe.scaled(0.1)
    assert short.train.epochs == max(1, round(0.1 * recipe.train.epochs))
    assert short.train.optimizer == recipe.train.optimizer
    assert set(recipe.learner_settings()) <= set(SETTINGS)


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


def write_images(folder, classes, number, seed=0):
    """Write small pictures, each class of its own colour, as FOLDER/class/*.png."""
    draws = np.random.default_rng(seed)
    colours = np.random.default_rng(1).integers(0, 256, (classes, 3))
    for index in range(classes):
        place = folder / f"n{index:04d}"
        place.mkdir(parents=True)
        for image in range(number):
            noise = draws.integers(-20, 20, (12, 10, 3))
            pixels = (colours[index] + noise).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(place / f"{image}.png")


@pytest.fixture
def small_imagenet(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "SIDE", 16)
    write_images(tmp_path / "train", 100, 2)
    write_images(tmp_path / "val", 100, 1, seed=5)
    return tmp_path


def test_the_imagenet_recipe_runs_from_folders_to_results(small_imagenet, fabric, tmp_path):
    ticks = []
    recipe = RECIPES["imagenet100"]().scaled(0.01)
    run = Run(
        recipe, tmp_path / "run", fabric, order=1993, data=small_imagenet, bounds=False, tasks=4, watch=ticks.append
    )
    results = run.start()
    assert results["classes_per_task"] == [10] * 4
    assert 0 <= results["task_il"]["ACC"] <= results["task_il"]["top5"] <= 100
    assert "top5" in results["class_il"]["MaxOutput"]["1"]
    assert {tick.phase for tick in ticks} == {"decoding images", "training", "retraining, round 1 of 1"}
    assert len(list((small_imagenet / "cache").iterdir())) == 8  # the images of each task, to train and to test
    assert (tmp_path / "run" / "report.html").exists()


def test_of_a_thousand_classes_the_hundred_of_the_papers_order_are_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "SIDE", 16)
    for part in ("train", "val"):
        write_images(tmp_path / part, 120, 1)
    expected = {f"n{index:04d}" for index in np.random.RandomState(1993).permutation(120)[:100]}
    train, test = sources.read_imagenet100(tmp_path)
    assert set(train.targets) == set(test.targets) == expected


def test_cub_starts_from_pretrained_weights_and_runs(tmp_path, monkeypatch, fabric):
    monkeypatch.setattr(sources, "SIDE", 16)
    write_images(tmp_path / "train", 200, 1)
    write_images(tmp_path / "test", 200, 1, seed=5)
    torch.manual_seed(1)
    weights = {
        name: value.half() if value.ndim == 4 else value for name, value in large_resnet18().state_dict().items()
    }
    save_file(weights, tmp_path / "weights.safetensors")
    recipe = RECIPES["cub200"]().scaled(0.02)
    run = Run(
        recipe, tmp_path / "run", fabric, data=tmp_path, weights=tmp_path / "weights.safetensors", bounds=False,
        group_sizes=[1],
    )  # fmt: skip
    loaded = run._fresh_backbone().state_dict()
    assert all(torch.equal(loaded[name], value.to(loaded[name].dtype)) for name, value in weights.items())
    assert run.start()["classes_per_task"] == [50] * 4


def test_the_archive_of_cub_is_read_as_its_lists_say(tmp_path):
    write_images(tmp_path / "CUB_200_2011" / "images", 3, 2)
    names = [f"n{index:04d}/{image}.png" for index in range(3) for image in range(2)]
    lines = {"images": names, "train_test_split": ["1", "0", "1", "1", "0", "1"]}
    for name, values in lines.items():
        text = "\n".join(f"{number} {value}" for number, value in enumerate(values, start=1))
        (tmp_path / "CUB_200_2011" / f"{name}.txt").write_text(text)
    train, test = sources.read_cub200(tmp_path)
    assert [path.name for path in train.files] == ["0.png", "0.png", "1.png", "1.png"]
    assert test.targets == ["n0000", "n0002"]


def test_missing_folders_and_strange_weights_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"there is no folder .*train.*--data"):
        sources.read_image_folders(tmp_path)
    save_file({"conv1.weight": torch.zeros(1)}, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match="has no weights for"):
        sources.imagenet_weights(large_resnet18(), tmp_path / "w.safetensors")


def test_another_selector_can_be_asked_to_predict():
    chosen = RECIPES["cifar100-10"]().selecting_by("ImportanceSignature-L1")
    assert [s.name for s in chosen.selectors] == [
        "ImportanceSignature-L1",
        "MaxOutput",
        "ImportanceSignature",
        "Cascade",
    ]
    with pytest.raises(ValueError, match="there is no selector 'Magic'; there are: .*MaxOutput"):
        chosen.selecting_by("Magic")


def test_joint_training_has_settings_of_its_own_where_those_of_single_tasks_would_be_poor(tmp_path, fabric):
    recipe = RECIPES["cifar100-10"]().scaled(0.1)
    run = Run(recipe, tmp_path, fabric)
    assert run._training_of("joint").epochs == 10
    assert run._training_of("joint").optimizer == cps.SGD(0.1, weight_decay=5e-4)
    assert run._training_of("finetuning") == recipe.train
    digits = Run(RECIPES["digits"](), tmp_path, fabric)
    assert digits._training_of("joint") == digits.recipe.train


def quick_run(folder, fabric, **changes):
    recipe = replace(RECIPES["digits"]().scaled(0.05), **changes)
    return Run(recipe, folder, fabric, tasks=1, bounds=False, group_sizes=(5, 1))


def test_a_run_notes_its_settings_and_another_one_does_not_take_its_folder(tmp_path, fabric):
    results = quick_run(tmp_path, fabric).start()
    assert results["settings"]["pruner"] == "NNrelief(alpha=0.7)"
    assert list(results["class_il"]["MaxOutput"]) == ["1", "5"]
    with pytest.raises(ValueError, match=r"holds another run \(pruner NNrelief\(alpha=0.7\)\)"):
        quick_run(tmp_path, fabric, pruner=cps.NNrelief(0.99)).start()
    with pytest.raises(ValueError, match="holds another run .train: optimizer"):
        quick_run(
            tmp_path, fabric, train=replace(RECIPES["digits"]().scaled(0.05).train, optimizer=cps.SGD(0.1))
        ).start()
    with pytest.raises(ValueError, match="kept no numbers for ImportanceSignature-L1"):
        quick_run(tmp_path, fabric, selectors=(cps.ImportanceSignature(norm=1),)).start()
    with locked(tmp_path / "model.cps"), pytest.raises(LockedError, match="another program"):
        quick_run(tmp_path, fabric).start()


def test_a_run_without_test_images_is_refused_before_it_learns(tmp_path, fabric):
    train, _ = RECIPES["digits"]().read(None)
    with pytest.raises(ValueError, match="a task without test images"):
        quick_run(tmp_path, fabric, read=lambda folder: (train, None)).start()
