"""A trained model of two folders, and a finished run of an experiment."""

import shutil
from pathlib import Path

import pytest

from commands import CPU, run_cps
from samples import write_image_folder


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Return a folder with parts.cps, learned from two folders, and with an inbox; and what was printed."""
    root = tmp_path_factory.mktemp("parts")
    write_image_folder(root / "january", ["bolt", "nut"], images=20)
    write_image_folder(root / "february", ["gear", "spring"], images=20)
    write_image_folder(root / "inbox", ["bolt", "spring"], images=5, seed=5)
    results = [run_cps("learn", root / "january", "--model", root / "parts.cps", "--epochs", 8, *CPU)]
    results.append(run_cps("learn", root / "february", "--model", root / "parts.cps", *CPU))
    return root, [result.output for result in results]


@pytest.fixture
def model(trained, tmp_path):
    """Return a copy of the trained model that a test may change."""
    return Path(shutil.copy(trained[0] / "parts.cps", tmp_path / "parts.cps"))


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory):
    """Return the folder of a short run of the digits, and what was printed."""
    folder = tmp_path_factory.mktemp("runs") / "digits"
    result = run_cps("bench", "digits", "--epochs-scale", "0.2", "--out", folder, *CPU)
    return folder, result.output
