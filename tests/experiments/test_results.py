"""results.json: one typed reader and writer, for files of every version."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cps.experiments.results import Results, read_results, write_results
from experiments.fake_results import make_closed_form

ROOT = Path(__file__).parents[2]
PUBLISHED = sorted((ROOT / "benchmarks" / "results").rglob("*.json"))
FILES = [path for path in PUBLISHED if "class_il" in json.loads(path.read_text())]
FILES.append(ROOT / "tests" / "fixtures" / "version0" / "results.json")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_reading_and_writing_a_results_file_gives_the_same_file(path, tmp_path):
    write_results(tmp_path / "results.json", read_results(path))
    before, after = json.loads(path.read_text()), json.loads((tmp_path / "results.json").read_text())
    assert after == before
    assert list(after) == list(before)
    assert list(after["task_il"]) == list(before["task_il"])
    metrics = [next(iter(run["class_il"].values()))["1"] for run in (before, after)]
    assert list(metrics[0]) == list(metrics[1])


def test_negative_control_another_number_is_noticed():
    before = json.loads(FILES[0].read_text())
    changed = json.loads(FILES[0].read_text())
    next(iter(changed["class_il"].values()))["1"]["accuracy"][-1][0] += 0.01
    assert Results.decode(changed).encode() != before
    assert Results.decode(changed).class_il != Results.decode(before).class_il


def test_group_sizes_are_integers_and_strings_only_in_the_file():
    results = read_results(ROOT / "benchmarks" / "results" / "digits.json")
    assert results.group_sizes == [1, 2, 5, 10, 20, 50]
    assert results.class_il["Cascade"][1].ACC == results.encode()["class_il"]["Cascade"]["1"]["ACC"]
    assert results.default_metrics[20].accuracy.shape == (5, 5)


def test_files_without_the_newer_keys_load():
    data = json.loads((ROOT / "benchmarks" / "results" / "digits.json").read_text())
    for name in ("epochs", "rounds", "precision", "settings", "milliseconds_per_image", "flips", "dense"):
        del data[name]
    for subnetwork in data["subnetworks"]:
        del subnetwork["parameters"], subnetwork["operations"]
    results = Results.decode(data)
    assert results.epochs is results.settings is results.dense is results.flips is None
    assert results.subnetworks[0].parameters is None
    assert results.encode() == {**data, "flips": {}}


def set_entry(data, value, *path):
    for name in path[:-1]:
        data = data[name]
    data[path[-1]] = value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("class_il"), "'class_il' is missing"),
        (lambda data: set_entry(data, "five", "seed"), "'seed' must be an integer, got 'five'"),
        (lambda data: set_entry(data, True, "seed"), "'seed' must be an integer, got True"),
        (lambda data: set_entry(data, None, "task_il", "ACC"), "'task_il.ACC' must be a number, got None"),
        (lambda data: set_entry(data, [[1.0], [2.0, 3.0]], "task_il", "accuracy"), "'task_il.accuracy' must be rows"),
        (lambda data: set_entry(data, "many", "task_il", "accuracy"), "'task_il.accuracy' must be rows of numbers"),
        (lambda data: set_entry(data, {"one": {}}, "class_il", "Cascade"), "'class_il.Cascade' must be integers"),
        (lambda data: set_entry(data, [], "class_il"), "'class_il' must be an object, got \\[\\]"),
        (lambda data: set_entry(data, [1, 2, 3], "epochs"), "'epochs' must be a list of 2 entries"),
        (lambda data: set_entry(data, 5, "classes_per_task"), "'classes_per_task' must be a list, got 5"),
        (lambda data: set_entry(data, "Magic", "default_selector"), "no entry for the default selector 'Magic'"),
    ],
)
def test_a_damaged_file_is_rejected_with_the_entry_that_is_wrong(tmp_path, change, message):
    path = tmp_path / "results.json"
    data = json.loads((ROOT / "benchmarks" / "results" / "digits.json").read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=f"results.json' holds no results of a run: .*{message}"):
        read_results(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "5", '{"a": 1}', "[project]\nname = 'x'"])
def test_another_file_is_rejected(tmp_path, text):
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ValueError, match=r"other.json' holds no results of a run"):
        read_results(tmp_path / "other.json")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="no run at '.*nowhere'; pass the folder of a run"):
        read_results(tmp_path / "nowhere")


def test_the_closed_form_is_a_bound_that_earlier_files_do_not_have(tmp_path):
    results = read_results(ROOT / "benchmarks" / "results" / "digits.json")
    early = json.loads((ROOT / "tests" / "fixtures" / "version0" / "results.json").read_text())
    assert Results.decode(early).bounds.closed_form is None
    bounds = replace(results.bounds, closed_form=make_closed_form(60))
    write_results(tmp_path / "results.json", replace(results, bounds=bounds))
    assert read_results(tmp_path / "results.json").bounds.closed_form == bounds.closed_form
    data = json.loads((tmp_path / "results.json").read_text())
    assert data["bounds"]["closed_form"]["class_il"]["20"]["ACC"] == 70
    set_entry(data, "much", "bounds", "closed_form", "kept", "means")
    with pytest.raises(ValueError, match="'bounds.closed_form.kept.means' must be an integer"):
        Results.decode(data)


def test_unknown_keys_of_newer_versions_are_ignored():
    data = json.loads((ROOT / "benchmarks" / "results" / "digits.json").read_text())
    assert Results.decode({**data, "energy": 5}).encode() == data
