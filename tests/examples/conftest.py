"""Fixtures for the tests of examples."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def load_example():
    """Return a function that imports an example by its name."""

    def load(name):
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "examples" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
