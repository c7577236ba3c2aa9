"""Style and types are tests too, so that one command runs all checks."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        pytest.param(["pyright", "--pythonpath", sys.executable], marks=pytest.mark.slow),
    ],
    ids=["ruff check", "ruff format", "pyright"],
)
def test_style_and_types_hold(command):
    pytest.importorskip(command[0])
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
