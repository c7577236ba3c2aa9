"""The shape of the project: layers, words, documentation."""

import ast
import doctest
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cps

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "cps"

LAYERS = [
    set(modules.split())
    for modules in (
        "plain masks metrics seeds evidence storage partition capture aside devices launching norm_kernels flat images published terminal progress gate replies",
        "choice lock capacity losses augmentation data backbones padding pixels folders kernels strided_kernels norms update_kernels views",
        "guard settings scenario subnetwork activity crowd convolution feed presentation shipment uploads",
        "draft extraction probe sources unread joining update",
        "miniatures admission twin",
        "network engine",
        "pruning selection training checkpoint modelfile sharing intake cost survey familiarity",
        "prediction observation cascade checklist comparison forgetting",
        "stream",
        "learner",
        "loading evaluation baselines recipes pictures proposal estimate resemblance inbox exporting",
        "report growing hosting",
        "bench inspection serving",
        "cli_bench cli_model cli_predict cli_export cli_serve",
        "cli",
        "__main__",
    )
]


def imports_of(module):
    tree = ast.parse((SOURCE / f"{module}.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("cps."):
            yield node.module.split(".")[1]
        elif isinstance(node, ast.ImportFrom) and node.module == "cps":
            yield from (alias.name for alias in node.names)


def test_every_module_has_a_layer():
    assert set().union(*LAYERS) == {path.stem for path in SOURCE.glob("*.py")} - {"__init__"}


def test_imports_point_down():
    level = {module: index for index, layer in enumerate(LAYERS) for module in layer}
    wrong = [
        f"{module} imports {other}"
        for module in level
        for other in imports_of(module)
        if other in level and level[other] >= level[module]
    ]
    assert wrong == []


def test_there_is_no_drawer():
    assert not {"utils", "common", "base", "core", "helpers"} & {path.stem for path in SOURCE.glob("*.py")}


def test_files_and_functions_are_small():
    for path in SOURCE.glob("*.py"):
        text = path.read_text()
        assert text.count("\n") <= 260, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
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
    subprocess.run([sys.executable, example, "--quick"], cwd=tmp_path, check=True, capture_output=True)


def test_links_and_paths_in_the_documentation_exist():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))):
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_tables_in_the_documentation_come_from_the_published_results():
    sys.path.insert(0, str(ROOT))
    from benchmarks.tables import TABLES, renewed

    for page in TABLES:
        assert renewed(page) == (ROOT / page).read_text(), f"run python -m benchmarks.tables to renew {page}"
