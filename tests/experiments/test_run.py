"""A run of a recipe, from a folder of data to results."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import cps
from cps.data import datasets
from cps.experiments.recipes import RECIPES
from cps.experiments.results import read_results
from cps.experiments.run import Run
from cps.network.backbones import large_resnet18
from cps.storage.lock import LockedError, locked
from samples import write_image_folder


def class_names(number):
    return [f"n{index:04d}" for index in range(number)]


@pytest.mark.slow
def test_the_imagenet_recipe_runs_from_folders_to_results(fabric, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "IMAGE_SIZE", 16)
    write_image_folder(tmp_path / "train", class_names(100), images=2)
    write_image_folder(tmp_path / "val", class_names(100), images=1, seed=5)
    progress = []
    run = Run(
        RECIPES["imagenet100"]().with_scaled_epochs(0.01),
        tmp_path / "run",
        fabric,
        order=1993,
        data=tmp_path,
        bounds=False,
        tasks=4,
        on_progress=progress.append,
    )
    results = run.start()
    assert results.classes_per_task == (10,) * 4
    assert 0 <= results.task_il.ACC <= results.task_il.top5 <= 100
    assert results.class_il["MaxOutput"][1].top5 is not None
    assert {at.phase for at in progress} == {"decoding images", "training", "retraining, round 1 of 1"}
    assert len(list((tmp_path / "cache").iterdir())) == 8  # training and test images of each task
    assert (tmp_path / "run" / "report.html").exists()
    assert read_results(tmp_path / "run" / "results.json").encode() == results.encode()


@pytest.mark.slow
def test_the_cub_recipe_starts_from_pretrained_weights(tmp_path, monkeypatch, fabric):
    monkeypatch.setattr(datasets, "IMAGE_SIZE", 16)
    write_image_folder(tmp_path / "train", class_names(200), images=1)
    write_image_folder(tmp_path / "test", class_names(200), images=1, seed=5)
    torch.manual_seed(1)
    weights = {
        name: value.half() if value.ndim == 4 else value for name, value in large_resnet18().state_dict().items()
    }
    save_file(weights, tmp_path / "weights.safetensors")
    recipe = RECIPES["cub200"]().with_scaled_epochs(0.02)
    run = Run(
        recipe, tmp_path / "run", fabric, data=tmp_path, weights=tmp_path / "weights.safetensors", bounds=False,
        group_sizes=[1],
    )  # fmt: skip
    loaded = run._setting.make_backbone().state_dict()
    assert all(torch.equal(loaded[name], value.to(loaded[name].dtype)) for name, value in weights.items())
    assert run.start().classes_per_task == (50,) * 4


def test_the_closed_form_runs_with_the_bounds_and_is_measured_once(tmp_path, fabric, monkeypatch):
    recipe = RECIPES["digits"]().with_scaled_epochs(0.01)
    progress = []
    run = Run(recipe, tmp_path, fabric, tasks=2, group_sizes=(1, 5), on_progress=progress.append)
    scenario = replace(recipe.scenario(None, None), tasks=recipe.scenario(None, None).tasks[:2])
    closed = run._run_bounds(scenario).closed_form
    assert (closed.space, closed.flips) == ("RandomReLU(size=1000)", False)
    assert list(closed.class_il) == [1, 5]
    assert closed.class_il[1].ACC > 97
    assert [(at.epoch, at.epochs) for at in progress if at.phase == "closed form"] == [(1, 2), (2, 2)]
    assert run._run_bounds(scenario).closed_form == closed  # read, not measured again
    assert [at.phase for at in progress].count("closed form") == 2
    fewer = replace(run, group_sizes=(5,))._run_bounds(scenario).closed_form
    assert fewer == replace(closed, class_il={5: closed.class_il[5]})
    more = replace(run, group_sizes=(2,))._run_bounds(scenario).closed_form
    assert list(more.class_il) == [2]
    assert [at.phase for at in progress].count("closed form") == 4


def test_the_closed_form_of_a_pretrained_recipe_reads_its_weights_and_adds_mirror_images(tmp_path, fabric, monkeypatch):
    monkeypatch.setattr(datasets, "IMAGE_SIZE", 16)
    write_image_folder(tmp_path / "train", class_names(200), images=1)
    write_image_folder(tmp_path / "test", class_names(200), images=1, seed=5)
    save_file(large_resnet18().state_dict(), tmp_path / "weights.safetensors")
    recipe = RECIPES["cub200"]()
    run = Run(recipe, tmp_path / "run", fabric, data=tmp_path, weights=tmp_path / "weights.safetensors")
    scenario = recipe.scenario(tmp_path, None)
    closed = run._run_closed_form(replace(scenario, tasks=scenario.tasks[:2]))
    assert (closed.space, closed.flips) == ("Pretrained()", True)
    assert closed.kept["weights"] > 4e7


def quick_run(folder, fabric, **changes):
    recipe = replace(RECIPES["digits"]().with_scaled_epochs(0.05), **changes)
    return Run(recipe, folder, fabric, tasks=1, bounds=False, group_sizes=(5, 1))


def test_a_folder_is_not_reused_for_a_run_with_other_settings(tmp_path, fabric):
    results = quick_run(tmp_path, fabric).start()
    assert results.settings["pruner"] == "NNrelief(alpha=0.7)"
    assert list(results.class_il["MaxOutput"]) == [1, 5]
    with pytest.raises(ValueError, match=r"holds another run \(pruner NNrelief\(alpha=0.7\)\)"):
        quick_run(tmp_path, fabric, pruner=cps.NNrelief(0.99)).start()
    with pytest.raises(ValueError, match="holds another run .train: optimizer"):
        quick_run(
            tmp_path, fabric, train=replace(RECIPES["digits"]().with_scaled_epochs(0.05).train, optimizer=cps.SGD(0.1))
        ).start()
    with pytest.raises(ValueError, match="has no statistics for ImportanceSignature-L1"):
        quick_run(tmp_path, fabric, selectors=(cps.ImportanceSignature(norm=1),)).start()
    with locked(tmp_path / "model.cps"), pytest.raises(LockedError, match="another program"):
        quick_run(tmp_path, fabric).start()


def test_a_folder_of_an_early_version_is_recognised_despite_renamed_settings(tmp_path):
    exact = cps.make_fabric(accelerator="cpu", precision="32-true")
    shutil.copy(Path(__file__).parents[1] / "fixtures" / "version0" / "run.json", tmp_path)
    note = json.loads((tmp_path / "run.json").read_text())
    assert "own=" in note["settings"]["selector Cascade"]
    recipe = RECIPES["digits"]()
    train, retrain = note["epochs"]
    recipe = replace(recipe, train=replace(recipe.train, epochs=train), retrain=replace(recipe.retrain, epochs=retrain))
    tasks = recipe.scenario(None, None).tasks[: note["tasks"]]
    Run(recipe, tmp_path, exact)._claim_folder(replace(recipe.scenario(None, None), tasks=tasks))
    other = replace(recipe, selectors=(cps.Cascade(temperature=9.0), cps.MaxOutput()))
    with pytest.raises(ValueError, match="holds another run .selector Cascade"):
        Run(other, tmp_path, exact)._claim_folder(replace(recipe.scenario(None, None), tasks=tasks))


def test_a_run_without_test_images_is_rejected_before_learning(tmp_path, fabric):
    train, _ = RECIPES["digits"]().read(None)
    with pytest.raises(ValueError, match="a task without test images"):
        quick_run(tmp_path, fabric, read=lambda folder: (train, None)).start()
