"""The rooms of src/cps: what they may import, and how many files they have."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "cps"


def lint_imports(root, source):
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


def test_rooms_import_only_the_rooms_below_them():
    done = lint_imports(ROOT, SOURCE.parent)
    assert done.returncode == 0, done.stdout[-3000:]


def test_negative_control_an_import_from_a_room_above_breaks_the_contract(tmp_path):
    shutil.copytree(SOURCE, tmp_path / "cps", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "cps" / "data" / "images.py").open("a") as images:
        images.write("\nfrom cps.learner import Learner\n")
    done = lint_imports(tmp_path, tmp_path)
    assert done.returncode == 1
    assert "cps.data.images -> cps.learner" in done.stdout


def test_no_folder_has_more_than_twenty_files_and_the_root_no_more_than_ten():
    for folder in (SOURCE, *(path for path in SOURCE.rglob("*") if path.is_dir())):
        files = [path for path in folder.glob("*.py*") if path.is_file()]
        assert len(files) <= (10 if folder == SOURCE else 20), folder


def test_only_commands_import_the_terminal_which_reconfigures_standard_output():
    users = {path for path in SOURCE.rglob("*.py") if "cps.cli.terminal" in path.read_text()}
    assert users
    assert {path.parent.name for path in users} == {"cli"}
