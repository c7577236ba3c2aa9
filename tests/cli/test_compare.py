"""`cps compare`."""

import json

import pytest

from commands import CPU, run_cps

QUICK = ["--epochs-scale", "0.05", "--tasks", "2", "--group-sizes", "1,5", *CPU]


def test_list_names_every_method_with_one_line():
    from cps.experiments.contestants import CONTESTANTS

    lines = run_cps("compare", "--list").output.splitlines()
    assert [line.split()[0] for line in lines] == list(CONTESTANTS)
    assert all(line.endswith(".") and len(line.split()) > 4 for line in lines)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ([], "pass a recipe, such as digits"),
        (["nothing"], "unknown recipe 'nothing'"),
        (["digits", "--methods", "icar"], "unknown method 'icar' (did you mean icarl"),
        (
            ["digits", "--methods", "er", "--memory", "9"],
            "er: a memory of 9 images cannot hold one of each of 10 classes",
        ),
        (["digits", "--methods", "er", "--orders", "podnet-1"], "is one of 100 classes, and the data has 10"),
        (["digits", "--orders", "x"], "unknown class order 'x'"),
        (["digits", "--budget", "half"], "--budget must be equal or own, got 'half'"),
        (["digits", "--memory", "9", "--memory-per-class", "1"], "pass either --memory or --memory-per-class"),
    ],
)
def test_wrong_options_are_errors_before_anything_is_learned(options, match, tmp_path):
    output = run_cps("compare", *options, "--out", tmp_path / "out", *CPU, code=1).output
    assert match in " ".join(output.split())
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").glob("order-*"))


@pytest.mark.slow
def test_a_comparison_prints_a_table_writes_files_and_resumes(tmp_path):
    command = ["compare", "digits", "--methods", "er", "--orders", "2", "--memory", "50", "--out", tmp_path, *QUICK]
    output = run_cps(*command).output
    rows = [line.split() for line in output.splitlines()]
    assert sum(row[:1] == ["ER"] for row in rows) == sum(row[:2] == ["closed", "form"] for row in rows) == 2
    data = json.loads((tmp_path / "results.json").read_text())
    assert [(each["method"], each["order"]) for each in data["results"]] == [
        ("er", 1993), ("closed-form", 1993), ("er", 1605), ("closed-form", 1605),
    ]  # fmt: skip
    assert {"report.html", "table.csv", "table.tex"} <= {path.name for path in tmp_path.iterdir()}
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("order-*/*/run.json")}
    assert run_cps(*command).output.split("accuracy (%)")[1] == output.split("accuracy (%)")[1]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    refused = run_cps(*command, "--seed", "3", code=1).output
    assert "holds another run (it differs in: seed, settings)" in " ".join(refused.split())
