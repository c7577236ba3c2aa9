"""The help of the commands."""

import os
import re
import subprocess
import sys

import pytest
import typer

from commands import run_cps
from cps.app.autoconfig import AUGMENTATIONS
from cps.cli import app
from cps.cli.model import BACKBONES
from cps.network.backbones import BUILTINS

COMMANDS = typer.main.get_command(app).commands


def test_help_does_not_import_torch():
    code = "import sys, cps.cli; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_help_of_learn_names_all_backbones_and_augmentations():
    assert BACKBONES.replace(" or ", ", ").split(", ") == [*BUILTINS, "torchvision:NAME", "timm:NAME"]
    (augment,) = (each for each in COMMANDS["learn"].params if each.name == "augment")
    assert augment.help.rstrip(".").replace(" or ", ", ").split(", ") == list(AUGMENTATIONS)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_argument_and_option_has_a_help_text(command):
    assert [each.name for each in COMMANDS[command].params if not getattr(each, "help", None)] == []
    assert f"Usage: root {command}" in re.sub(r"\s+", " ", run_cps(command, "--help").output)


@pytest.mark.parametrize(("words", "expected"), [("cps le", {"learn"}), ("cps verify --l", {"--loader"})])
def test_the_shell_completes_commands_and_options(words, expected):
    program = "import sys; sys.argv = ['cps']; from cps.cli import main; main()"
    asked = {"_CPS_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **asked}, capture_output=True, text=True, check=False
    )
    assert set(done.stdout.split()) == expected, done.stderr
