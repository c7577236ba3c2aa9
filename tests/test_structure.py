"""The shape of the project: layers, words, documentation."""

import ast
import doctest
import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cps

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "cps"

PAGE = (ROOT / "docs" / "architecture.md").read_text()
LAYERS = [set(re.findall(r"`(\w+)`", row)) for row in reversed(re.findall(r"^\| \d+ \| (.*) \|$", PAGE, re.M))]


def imports_of(code):
    """Return the modules of cps that some code imports."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name.split(".")[1] for name in names if name.startswith("cps."))


def pointing_up(codes):
    """Return what imports a module of its own layer or of a higher one; `codes` is the code of each module."""
    level = {module: index for index, layer in enumerate(LAYERS) for module in layer}
    return [
        f"{module} imports {other}"
        for module, code in codes.items()
        for other in imports_of(code)
        if level.get(other, -1) >= level[module]
    ]


def test_every_module_has_a_layer():
    assert set().union(*LAYERS) == {path.stem for path in SOURCE.glob("*.py")} - {"__init__"}


def test_only_commands_know_the_terminal_which_changes_the_streams_of_a_program():
    users = {path.stem for path in SOURCE.glob("*.py") if "terminal" in imports_of(path.read_text())}
    assert "cli" in users
    assert {name for name in users if not name.startswith("cli")} == set()


def test_imports_point_down():
    assert pointing_up({path.stem: path.read_text() for path in SOURCE.glob("*.py") if path.stem != "__init__"}) == []


def test_negative_control_imports_that_point_up_are_seen_in_every_form():
    forms = ("import cps.learner", "from cps.learner import Learner", "from cps import learner, masks")
    assert [pointing_up({"network": form}) for form in forms] == [["network imports learner"]] * 3
    assert pointing_up({"network": "from cps import network"})
    assert not pointing_up({"network": "import cps.network.masks, cps\nfrom cps import masks"})


def test_there_is_no_drawer():
    assert not {"utils", "common", "base", "core", "helpers"} & {path.stem for path in SOURCE.glob("*.py")}


def test_files_and_functions_are_small():
    for path in SOURCE.glob("*.py"):
        text = path.read_text()
        assert text.count("\n") <= 260, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path}:{node.name}"


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


def test_the_three_lists_of_public_names_agree():
    homes = {name for names in cps._HOME.values() for name in names}
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    typed = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("cps.")
        for alias in node.names
    }
    assert homes == typed == set(cps.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = cps.Nothing


@pytest.mark.parametrize("module", sorted(set().union(*LAYERS) - {"__main__"}))
def test_examples_in_docstrings_run(module):
    assert doctest.testmod(importlib.import_module(f"cps.{module}")).failed == 0


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
    sys.path.insert(0, str(ROOT))
    from benchmarks.tables import TABLES, renewed

    for page in TABLES:
        assert renewed(page) == (ROOT / page).read_text(), f"run python -m benchmarks.tables to renew {page}"
