"""`cps bench` runs an experiment and writes its results."""

import json

import pytest

from commands import CPU, run_cps


@pytest.mark.slow
def test_finetuning_forgets_and_cps_does_not(digits_run):
    folder, output = digits_run
    results = json.loads((folder / "results.json").read_text())
    assert results["task_il"]["ACC"] > 90
    assert results["bounds"]["finetuning"]["BWT"] > 50
    assert results["class_il"]["MaxOutput"]["20"]["ACC"] > results["bounds"]["finetuning"]["ACC"]
    assert "finetuning" in output
    assert "closed form" in output
    assert "cps, task known 0.0" in output


@pytest.mark.slow
def test_results_json_has_the_documented_keys(digits_run):
    results = json.loads((digits_run[0] / "results.json").read_text())
    assert results["recipe"] == "digits"
    assert results["order"] == "identity"
    assert results["seed"] == 0
    assert results["classes_per_task"] == [2] * 5
    assert set(results["seconds"]) == {"learn", "evaluate"}
    assert {"ACC", "BWT", "AIA", "accuracy"} <= set(results["task_il"])
    assert results["default_selector"] in results["class_il"]
    for by_size in results["class_il"].values():
        assert list(by_size) == ["1", "2", "5", "10", "20", "50"]
        for entry in by_size.values():
            assert {"ACC", "BWT", "AIA", "accuracy", "selection"} <= set(entry)
            assert [len(row) for row in entry["accuracy"]] == [5] * 5
    assert set(results["bounds"]) == {"finetuning", "joint", "closed_form"}
    closed = results["bounds"]["closed_form"]
    assert {"space", "classifier", "flips", "task_il", "class_il", "kept", "seconds"} == set(closed)
    assert list(closed["class_il"]) == ["1", "2", "5", "10", "20", "50"]
    assert closed["class_il"]["1"]["ACC"] > 97
    assert [entry["task"] for entry in results["subnetworks"]] == [0, 1, 2, 3, 4]
    for cost in ("parameters", "operations"):  # none is larger than the dense network, and some are smaller
        costs = [entry[cost] for entry in results["subnetworks"]]
        assert max(costs) <= results["dense"][cost] > min(costs)
    taken = [entry["taken"] for entry in results["subnetworks"]]
    assert taken == sorted(taken)
    assert sum(results["sharing"]) == pytest.approx(100)
    assert {"cps", "torch", "python"} <= set(results["versions"])
    assert results["device"]


@pytest.mark.slow
def test_a_finished_run_leaves_a_model_and_no_checkpoint(digits_run):
    names = {path.name for path in digits_run[0].iterdir()}
    assert {"model.cps", "results.json", "report.html"} <= names
    assert not any(name.endswith((".safetensors", ".partial")) for name in names)


@pytest.mark.slow
def test_running_the_same_command_again_gives_the_same_results(digits_run):
    before = json.loads((digits_run[0] / "results.json").read_text())
    run_cps("bench", "digits", "--epochs-scale", "0.2", "--out", digits_run[0], *CPU)
    after = json.loads((digits_run[0] / "results.json").read_text())
    times = {"seconds": 0, "milliseconds_per_image": 0}
    assert {**before, **times} == {**after, **times}


@pytest.mark.slow
def test_a_folder_with_another_run_is_rejected(digits_run):
    command = ["bench", "digits", "--seed", "5", "--epochs-scale", "0.2", "--out", digits_run[0], *CPU]
    assert "holds another run (seed 0)" in run_cps(*command, code=1).output


@pytest.mark.slow
def test_results_and_report_contain_the_tasks_and_epochs_of_a_short_trial(tmp_path):
    command = ["bench", "digits", "--tasks", "2", "--epochs-scale", "0.05", "--no-bounds", "--group-sizes", "1"]
    command += ["--precision", "32-true"]
    run_cps(*command, *CPU, "--out", tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["classes_per_task"] == [2, 2]
    assert (results["epochs"], results["rounds"], results["precision"]) == ([1, 1], 2, "32-true")
    page = (tmp_path / "report.html").read_text()
    assert "1 + 2 x 1 epochs, 32-true" in page
    assert "The same for groups" not in page  # there is one group size
    result = run_cps(*command, *CPU, "--out", tmp_path, "--tasks", "3", code=1)
    assert "holds another run (tasks 2)" in result.output


def test_list_shows_the_recipes():
    assert "digits" in run_cps("bench", "--list").output


def test_list_with_a_recipe_shows_all_its_settings():
    printed = run_cps("bench", "cifar100-10-single", "--list").output
    for word in ("SGD(lr=0.1", "Contrastive", "Rotations", "budget=0.01", "temperature=5.0"):
        assert word in printed, word
