"""Run cps commands in the tests, and forge model files."""

import json

from safetensors import safe_open
from safetensors.torch import save_file
from typer.testing import CliRunner

CPU = ["--accelerator", "cpu"]


def run_cps(*arguments, code=0):
    """Run a command, check its exit code, and return the result."""
    from cps.cli import app

    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def predict_json(*arguments):
    """Return the rows that `cps predict --json` prints."""
    return [json.loads(line) for line in run_cps("predict", *arguments, "--json", *CPU).stdout.splitlines()]


def rewrite_model(model, change):
    """Change the header or the tensors of a model file, and give it valid digests, as a forger would."""
    from cps.storage import container

    with safe_open(model, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = dict(file.metadata())
    header = json.loads(metadata["header"])
    change(header, tensors, metadata)
    header["digests"] = {name: container.digest({name: value}) for name, value in tensors.items()}
    text = json.dumps(header)
    save_file(tensors, model, {**metadata, "header": text, "digest": container._sha(text)})


def truncate(path):
    """Cut off the end of a file."""
    path.write_bytes(path.read_bytes()[:-1000])
