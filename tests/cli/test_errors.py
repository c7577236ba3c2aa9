"""Errors of the commands are one line without a traceback, and leave the model as it is."""

import pytest

from commands import CPU, rewrite_model, run_cps, truncate
from cps.storage.lock import locked

WRONG_COMMANDS = {
    "is not a safetensors file": ["learn", "january", "--model", "new.cps", "--weights", "parts.cps.broken"],
    "there is no file of weights": ["learn", "january", "--model", "new.cps", "--weights", "nowhere"],
    "unknown accelerator 'abacus'": ["learn", "january", "--model", "new.cps", "--accelerator", "abacus"],
    "unsupported precision '7-bit'": ["learn", "january", "--model", "new.cps", "--precision", "7-bit"],
    "is a file; a folder is needed": ["learn", "parts.cps", "--model", "new.cps"],
    "is a folder, not a file": ["learn", "january", "--model", "february"],
    "february' is a folder, not a file": ["inspect", "february"],
}


def change_bias(model):
    rewrite_model(model, lambda header, tensors, metadata: tensors["task/0/head/bias"].add_(1))


def change_version(model):
    rewrite_model(model, lambda header, tensors, metadata: metadata.update(version="7"))


def flip_bit(model):
    content = bytearray(model.read_bytes())
    content[-5] ^= 1
    model.write_bytes(content)


DAMAGE = {
    flip_bit: "does not match its digest",
    truncate: "damaged",
    change_version: "update cps",
    change_bias: "sealed",
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "nothing"], "unknown recipe 'nothing'"),
        (["bench", "digits", "--group-sizes", "1,x"], "--group-sizes must be integers"),
        (["bench", "digits", "--group-sizes", "0"], "at least 1"),
        (["bench", "digits", "--epochs-scale", "0"], "must be above 0"),
        (["bench", "digits", "--data", "somewhere"], "need no data folder, got 'somewhere'"),
        (["report", "nowhere"], "nowhere"),
        (["report", "pyproject.toml"], "holds no results"),
    ],
)
def test_errors_of_bench_and_report_are_one_line(arguments, message, tmp_path):
    assert message in run_cps(*arguments, "--out", tmp_path / "out", code=1).output


@pytest.mark.parametrize("message", WRONG_COMMANDS)
def test_errors_of_learn_and_inspect_are_one_line(trained, message, monkeypatch):
    monkeypatch.chdir(trained[0])
    (trained[0] / "parts.cps.broken").write_bytes(b"\x89PNG and so on, which is no safetensors file at all")
    assert message in run_cps(*WRONG_COMMANDS[message], code=1).output.replace("\n", " ")


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("command", ["learn", "predict", "inspect", "verify", "forget"])
def test_every_command_rejects_a_damaged_model(trained, model, command, damage):
    folder = trained[0] / "january"
    damage(model)
    before = model.read_bytes()
    arguments = {
        "learn": [folder, "--model", model, *CPU],
        "predict": [folder, "--model", model, *CPU],
        "inspect": [model],
        "verify": [model],
        "forget": [model, "--task", 1],
    }[command]
    if (command, damage) == ("inspect", change_bias):
        run_cps(command, *arguments)  # it does not check fingerprints, which `verify` does
        return
    assert DAMAGE[damage] in run_cps(command, *arguments, code=1).output.replace("\n", " ")
    assert model.read_bytes() == before
    assert [path.name for path in model.parent.iterdir()] == ["parts.cps"]


def test_a_locked_model_cannot_be_changed(trained, model):
    with locked(model):
        for arguments in (["learn", trained[0] / "january", "--model", model, *CPU], ["forget", model, "--task", 1]):
            assert "another program is changing" in run_cps(*arguments, code=1).output.replace("\n", " ")
