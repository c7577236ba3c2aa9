"""`cps verify` lists every check."""

import json
from functools import partial

import pytest
from safetensors import safe_open

import cps
from commands import rewrite_model, run_cps, truncate
from cps.app import inspect
from samples import make_task


@pytest.fixture
def loaded_on_cpu(monkeypatch):
    """Load models on the device that they were learned on; on another one their outputs are not compared."""
    monkeypatch.setattr(inspect, "load", partial(cps.load, fabric=cps.make_fabric(accelerator="cpu")))


@pytest.mark.usefixtures("loaded_on_cpu")
def test_every_check_is_listed(trained):
    checks = json.loads(run_cps("verify", trained[0] / "parts.cps", "--json").stdout)
    with safe_open(trained[0] / "parts.cps", framework="pt") as file:
        tensors = len(list(file.keys()))
    assert [(check["number"], check["result"]) for check in checks] == [
        (1, "ok"), (tensors, "ok"), (2, "ok"), (2, "ok"), (2, "identical to when they were learned"),
    ]  # fmt: skip
    assert "is intact" in run_cps("verify", trained[0] / "parts.cps").output


@pytest.mark.usefixtures("loaded_on_cpu")
def test_outputs_that_differ_from_when_they_were_learned_are_an_error(model):
    def forge(header, tensors, metadata):
        header["notes"][1]["answers"]["digest"] = "0" * 64

    rewrite_model(model, forge)
    assert "the outputs of task 2 on fixed inputs differ" in run_cps("verify", model, code=1).output.replace("\n", " ")


def test_outputs_of_another_machine_are_not_compared(model):
    def move(header, tensors, metadata):
        header["notes"][1]["answers"]["on"] = "torch 1.0, abacus"
        header["notes"][0] = {}

    rewrite_model(model, move)
    checks = json.loads(run_cps("verify", model, "--json").stdout)
    assert checks[-1]["number"] == 2
    assert "not compared: learned on an unknown machine; torch 1.0, abacus" in checks[-1]["result"]


def test_a_damaged_model_is_reported_as_json(model):
    truncate(model)
    checks = json.loads(run_cps("verify", model, "--json", code=1).stdout)
    assert "damaged" in checks[0]["result"]


def test_a_model_with_a_custom_backbone_is_checked_except_for_its_outputs(make_learner, tmp_path):
    learner = make_learner()
    learner.learn(make_task(0))
    learner.annotate(0, **{"accuracy": 0.9, "day": ["any"], "usual output": "much"})
    learner.save(tmp_path / "own.cps")
    assert "backbone custom" in run_cps("inspect", tmp_path / "own.cps").output
    checks = json.loads(run_cps("verify", tmp_path / "own.cps", "--json").stdout)
    assert [check["result"] for check in checks[:4]] == ["ok"] * 4
    assert "not compared" in checks[-1]["result"]
    for command in (
        ["forget", tmp_path / "own.cps", "--task", 1],
        ["predict", "x.png", "--model", tmp_path / "own.cps"],
    ):
        assert "your own backbone" in run_cps(*command, code=1).output.replace("\n", " ")
