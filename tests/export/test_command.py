"""`cps export` writes files and prints what they cost."""

import json
import re
import sys

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from cps.cli import app

pytestmark = pytest.mark.slow  # writing an ONNX graph takes about a second

runner = CliRunner()


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory):
    """Run `cps export --all` and return the path of the graph and what was printed."""
    path = tmp_path_factory.mktemp("command") / "all.onnx"
    done = runner.invoke(app, ["export", str(model), "--all", "--to", str(path)])
    assert done.exit_code == 0, done.output
    return path, done.output


def test_the_command_writes_the_graph_of_all_tasks(exported, learner, run_onnx, images):
    outputs, metadata = run_onnx(exported[0], images)
    names = json.loads(metadata["classes"])
    assert [names[index] for index in outputs["class"].tolist()] == learner.predict(images).classes


def test_the_command_prints_size_cost_and_the_difference_from_torch(exported):
    assert "all 3 tasks" in exported[1]
    for what in ("KiB", "parameters", "million operations", "onnxruntime and torch differ by", "on noise"):
        assert what in exported[1]


def test_the_command_writes_a_state_dict_of_one_task(model, learner, tmp_path):
    path = tmp_path / "second.safetensors"
    done = runner.invoke(app, ["export", str(model), "--task", "2", "--to", str(path)])
    assert done.exit_code == 0, done.output
    saved, expected = load_file(path), learner.extract(1).state_dict()
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either --task, or --all"),
        (["--task", "1", "--all"], "give either --task, or --all"),
        (["--task", "1", "--selector", "MaxOutput"], "--selector needs --all"),
    ],
)
def test_wrong_options_exit_with_status_2(model, arguments, message):
    done = runner.invoke(app, ["export", str(model), "--to", "x.onnx", *arguments])
    assert done.exit_code == 2
    assert message in re.sub(r"[\s│]+", " ", done.output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "4", "--to", "x.onnx"], "task must be between 1 and 3"),
        (["--task", "1", "--to", "x.pt"], "must end in .onnx"),
        (["--all", "--to", "x.safetensors"], "must end in .onnx"),
        (["--all", "--selector", "Oracle", "--to", "x.onnx"], "choose from: Fusion, MaxOutput, ImportanceSignature"),
    ],
)
def test_errors_are_printed_and_nothing_is_written(model, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = runner.invoke(app, ["export", str(model), *arguments])
    assert done.exit_code == 1
    assert message in done.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("package", "command", "extra"),
    [("onnxscript", ["--task", "1", "--to", "x.onnx"], "[export]"), ("fastapi", ["--port", "0"], "[serve]")],
)
def test_a_missing_package_prints_the_command_that_installs_it(model, package, command, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    for name in [name for name in sys.modules if name == "cps.serve.server"]:
        monkeypatch.delitem(sys.modules, name)
    done = runner.invoke(app, [extra.strip("[]"), str(model), *command])
    assert done.exit_code == 1
    assert f'pip install "continual-prune-and-select{extra}"' in done.output
