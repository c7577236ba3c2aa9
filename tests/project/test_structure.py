"""The shape of the project: rooms, public names, documentation."""

import doctest
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cps

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "cps"

MODULES = sorted(
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
    for path in SOURCE.rglob("*.py")
    if path.name not in {"__init__.py", "__main__.py"}
)


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


def test_no_folder_has_more_than_twenty_files_and_the_root_no_more_than_eight():
    for folder in (SOURCE, *(path for path in SOURCE.rglob("*") if path.is_dir())):
        files = [path for path in folder.glob("*.py*") if path.is_file()]
        assert len(files) <= (8 if folder == SOURCE else 20), folder


def test_only_commands_import_the_terminal_which_reconfigures_standard_output():
    users = {path for path in SOURCE.rglob("*.py") if "cps.cli.terminal" in path.read_text()}
    assert users
    assert {path.parent.name for path in users} == {"cli"}


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


def blocks(path, language):
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.S)


@pytest.mark.parametrize(
    "page", ["README.md", *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").glob("*.md")))]
)
def test_python_in_the_documentation_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block in blocks(ROOT / page, "python"):
        exec(compile(block, page, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_run(example, tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, example, "--quick"], cwd=tmp_path, env=environment, check=True, capture_output=True)


def test_links_and_paths_in_the_documentation_exist():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))):
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_tables_in_the_documentation_come_from_the_published_results():
    from benchmarks.tables import TABLES, renewed

    for page in TABLES:
        assert renewed(page) == (ROOT / page).read_text(), f"run python -m benchmarks.tables to renew {page}"
