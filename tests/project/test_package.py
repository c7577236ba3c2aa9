"""The package: what it declares, what its archives hold, and that the installed wheel works."""

import importlib.util
import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import cps

ROOT = Path(__file__).parents[2]
LEFT_OUT = (".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "site")


def run(*command, cwd, **settings):
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False, **settings)  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def check_imports(project):
    return subprocess.run(
        [sys.executable, "-m", "deptry", "src"], cwd=project, capture_output=True, text=True, check=False
    )


def test_every_import_is_declared():
    pytest.importorskip("deptry")
    done = check_imports(ROOT)
    assert done.returncode == 0, done.stderr[-3000:]


def test_negative_control_an_undeclared_import_is_found(tmp_path):
    pytest.importorskip("deptry")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "src" / "cps").mkdir(parents=True)
    (tmp_path / "src" / "cps" / "new.py").write_text("import scipy\n")
    assert "'scipy' imported but" in check_imports(tmp_path).stderr


def test_paths_of_the_readme_lead_to_the_repository_or_are_left_out():
    spec = importlib.util.spec_from_file_location("setup_script", ROOT / "setup.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = "![A plot](docs/a.png) [a page](docs/b.md#c) [the paper](https://doi.org/1)"
    assert script.index_page(page, "") == "*A plot* a page [the paper](https://doi.org/1)"
    assert script.index_page(page, "https://x/y/") == (
        "![A plot](https://x/y/docs/a.png) [a page](https://x/y/docs/b.md#c) [the paper](https://doi.org/1)"
    )


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """Return the source distribution and the wheel, which is built from it, as a release builds them."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(ROOT, folder / "project", ignore=shutil.ignore_patterns(*LEFT_OUT))
    shutil.copytree(ROOT / ".ci", folder / "project" / ".ci")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", cwd=folder / "project")
    (source,), (wheel,) = (list((folder / "dist").glob(pattern)) for pattern in ("*.tar.gz", "*.whl"))
    return source, wheel


@pytest.mark.slow
def test_an_index_accepts_the_archives(archives, tmp_path):
    pytest.importorskip("twine")
    assert archives[0].name == f"continual_prune_and_select-{cps.__version__}.tar.gz"
    run(sys.executable, "-m", "twine", "check", "--strict", *archives, cwd=tmp_path)
    with zipfile.ZipFile(archives[1]) as wheel:
        (name,) = (each for each in wheel.namelist() if each.endswith("METADATA"))
        page = wheel.read(name).decode()
    assert "# cps: Continual Prune-and-Select" in page
    assert re.findall(r"\]\((?!https://)", page) == []


@pytest.mark.slow
def test_the_source_distribution_has_every_file_and_runs_its_tests(archives, tmp_path):
    with tarfile.open(archives[0]) as archive:
        archive.extractall(tmp_path, filter="data")
    (project,) = tmp_path.iterdir()
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    missing = [name for name in tracked.splitlines() if (ROOT / name).exists() and not (project / name).exists()]
    assert [name for name in missing if not name.startswith(".")] == []
    tests = ["tests/test_config.py", "tests/data/test_class_orders.py"]
    environment = {**os.environ, "PYTHONPATH": str(project / "src")}
    assert "passed" in run(sys.executable, "-m", "pytest", "-p", "no:xdist", *tests, cwd=project, env=environment)


@pytest.mark.slow
def test_the_demo_runs_from_the_wheel_with_neither_matplotlib_nor_scikit_learn(archives, tmp_path):
    """The environment is empty but for links to the packages here, of which two are hidden."""
    venv.create(tmp_path / "venv", symlinks=os.name != "nt")
    binaries = tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin")
    python = binaries / Path(sys.executable).name
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", archives[1]]
    run(*install, cwd=tmp_path, env=environment)
    find = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(run(python, "-c", find, cwd=tmp_path).strip())
    links = [f"import site; site.addsitedir({folder!r})" for folder in site.getsitepackages()]
    hidden = "import sys; sys.modules.update(matplotlib=None, sklearn=None)"
    (packages / "zz_test.pth").write_text("\n".join([*links, hidden]))

    where = run(python, "-c", "import cps; print(cps.__file__)", cwd=tmp_path, env=environment)
    assert Path(where.strip()) == packages / "cps" / "__init__.py"
    demo = ["bench", "digits", "--tasks", "2", "--epochs-scale", "0.05", "--no-bounds", "--accelerator", "cpu"]
    printed = run(binaries / "cps", *demo, cwd=tmp_path, env=environment)
    assert "task known" in printed
    assert "Plots need matplotlib" in (tmp_path / "runs" / "digits" / "report.html").read_text()
