"""README, docs and examples: their code runs, their links exist, and their tables are up to date."""

import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def blocks(path, language):
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.S)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", ["README.md", *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").glob("*.md")))]
)
def test_python_in_the_documentation_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block in blocks(ROOT / page, "python"):
        exec(compile(block, page, "exec"), {"__name__": "__main__"})


NEEDED = {"avalanche_strategy.py": "avalanche", "ray_data.py": "ray"}  # packages that no extra installs


@pytest.mark.slow
@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_run(example, tmp_path):
    package = NEEDED.get(example.name)
    if package is not None and find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    sockets = {"RAY_TMPDIR": tempfile.gettempdir()}  # a path of theirs must be short
    environment = {**os.environ, "TMPDIR": str(tmp_path), **sockets}
    subprocess.run([sys.executable, example, "--quick"], cwd=tmp_path, env=environment, check=True, capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "notebook", sorted((ROOT / "examples" / "notebooks").glob("*.ipynb")), ids=lambda path: path.name
)
def test_notebooks_run_and_are_stored_without_outputs(notebook, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["outputs"] for cell in cells] == [[]] * len(cells)
    names = {"__name__": "__main__"}
    for cell in cells:
        exec(compile("".join(cell["source"]), notebook.name, "exec"), names)


def test_links_and_paths_in_the_documentation_exist():
    for page in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))):
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_tables_in_the_documentation_come_from_the_published_results():
    from studies.tables import TABLES, update_page

    for page in TABLES:
        assert update_page(page) == (ROOT / page).read_text(), f"run python -m studies.tables to update {page}"
