"""The command line: the demo, its files, its page and its errors."""

import io
import json
import shutil
import subprocess
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cps.cli import app, terminal

runner = CliRunner()
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "digits"
    done = runner.invoke(
        app, ["bench", "digits", "--epochs-scale", "0.2", "--out", str(folder), "--accelerator", "cpu"]
    )
    assert done.exit_code == 0, done.output
    return folder, done.output


def test_the_demo_shows_that_finetuning_forgets_and_cps_does_not(demo):
    folder, output = demo
    results = json.loads((folder / "results.json").read_text())
    assert results["task_il"]["ACC"] > 90
    assert results["bounds"]["finetuning"]["BWT"] > 50
    assert results["class_il"]["MaxOutput"]["20"]["ACC"] > results["bounds"]["finetuning"]["ACC"]
    assert "finetuning" in output
    assert "cps, task known 0.0" in output


def test_results_have_the_promised_form(demo):
    results = json.loads((demo[0] / "results.json").read_text())
    assert results["recipe"] == "digits"
    assert results["order"] == "identity"
    assert results["seed"] == 0
    assert results["classes_per_task"] == [2] * 5
    assert set(results["seconds"]) == {"learn", "evaluate"}
    assert {"ACC", "BWT", "AIA", "accuracy"} <= set(results["task_il"])
    assert results["default_selector"] in results["class_il"]
    for by_size in results["class_il"].values():
        assert list(by_size) == ["1", "2", "5", "10", "20", "50"]
        for entry in by_size.values():
            assert {"ACC", "BWT", "AIA", "accuracy", "selection"} <= set(entry)
            assert [len(row) for row in entry["accuracy"]] == [5] * 5
    assert set(results["bounds"]) == {"finetuning", "joint"}
    assert [entry["task"] for entry in results["subnetworks"]] == [0, 1, 2, 3, 4]
    for cost in ("parameters", "operations"):  # none is larger than the dense network, and some are smaller
        costs = [entry[cost] for entry in results["subnetworks"]]
        assert max(costs) <= results["dense"][cost] > min(costs)
    taken = [entry["taken"] for entry in results["subnetworks"]]
    assert taken == sorted(taken)
    assert sum(results["sharing"]) == pytest.approx(100)
    assert {"cps", "torch", "python"} <= set(results["versions"])
    assert results["device"]


def test_the_run_leaves_a_model_and_no_checkpoint(demo):
    names = {path.name for path in demo[0].iterdir()}
    assert {"model.cps", "results.json", "report.html"} <= names
    assert not any(name.endswith((".safetensors", ".partial")) for name in names)


def test_the_same_command_again_gives_the_same_results(demo):
    before = json.loads((demo[0] / "results.json").read_text())
    done = runner.invoke(
        app, ["bench", "digits", "--epochs-scale", "0.2", "--out", str(demo[0]), "--accelerator", "cpu"]
    )
    assert done.exit_code == 0
    after = json.loads((demo[0] / "results.json").read_text())
    times = {"seconds": 0, "milliseconds_per_image": 0}
    assert {**before, **times} == {**after, **times}


def test_a_folder_with_another_run_is_refused(demo):
    command = ["bench", "digits", "--seed", "5", "--epochs-scale", "0.2", "--out", str(demo[0])]
    done = runner.invoke(app, [*command, "--accelerator", "cpu"])
    assert done.exit_code == 1
    assert "holds another run (seed 0)" in done.output


def test_the_page_stands_alone(demo):
    page = (demo[0] / "report.html").read_text()
    assert page.count("<svg") == page.count("<figure>") == 10
    assert "http://" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )
    assert "<script" not in page
    assert 'src="' not in page


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_opens_in_a_browser(demo, tmp_path):
    shot = tmp_path / "page.png"
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}",
        "--window-size=1100,1600", f"--screenshot={shot}", "--virtual-time-budget=3000", (demo[0] / "report.html").as_uri(),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert shot.stat().st_size > 20_000
    dump = subprocess.run(
        [*command[:-3], "--dump-dom", command[-1]], check=True, capture_output=True, timeout=120, text=True
    ).stdout
    assert dump.count("</svg>") == 10


def test_report_makes_one_page_of_several_runs(demo, tmp_path):
    page, other = tmp_path / "page.html", tmp_path / "other.json"
    other.write_text(json.dumps(json.loads((demo[0] / "results.json").read_text()) | {"seed": 5}))
    done = runner.invoke(app, ["report", str(demo[0]), str(other), "--out", str(page)])
    assert done.exit_code == 0, done.output
    assert page.read_text().count("<h1>") == 3  # one of them about both
    done = runner.invoke(app, ["report", str(demo[0]), str(demo[0] / "results.json"), "--out", str(page)])
    assert "given more than once" in done.output
    assert page.read_text().count("<h1>") == 1


def test_a_trial_of_few_tasks_and_epochs_says_so(tmp_path):
    command = ["bench", "digits", "--tasks", "2", "--epochs-scale", "0.05", "--no-bounds", "--group-sizes", "1"]
    done = runner.invoke(app, [*command, "--accelerator", "cpu", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["classes_per_task"] == [2, 2]
    assert (results["epochs"], results["rounds"], results["precision"]) == ([1, 1], 2, "32-true")
    page = (tmp_path / "report.html").read_text()
    assert "1 + 2 x 1 epochs, 32-true" in page
    assert "The same for groups" not in page  # there is one group size
    done = runner.invoke(app, [*command, "--accelerator", "cpu", "--out", str(tmp_path), "--tasks", "3"])
    assert "holds another run (tasks 2)" in done.output


def test_without_a_terminal_progress_is_lines(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    said = io.StringIO()
    lines = terminal.Lines(Console(file=said))
    for second in range(0, 200, 10):
        now[0] = float(second)
        lines.show("task 1 of 2, training", second // 10, 20, "loss 0.5")
    lines.show("a moment", 1, 1, "")
    lines.end()
    assert said.getvalue().splitlines() == [
        "task 1 of 2, training: 7 of 20, loss 0.5, 70 s",
        "task 1 of 2, training: 14 of 20, loss 0.5, 140 s",
        "task 1 of 2, training: 19 of 20, loss 0.5, 190 s",
    ]


def test_the_recipes_are_listed():
    done = runner.invoke(app, ["bench", "--list"])
    assert done.exit_code == 0
    assert "digits" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "nothing"], "no recipe 'nothing'"),
        (["bench", "digits", "--group-sizes", "1,x"], "--group-sizes takes whole numbers"),
        (["bench", "digits", "--group-sizes", "0"], "at least 1"),
        (["bench", "digits", "--epochs-scale", "0"], "must be above 0"),
        (["bench", "digits", "--data", "somewhere"], "leave out the folder of data"),
        (["report", "nowhere"], "nowhere"),
        (["report", "pyproject.toml"], "holds no results"),
    ],
)
def test_mistakes_are_said_in_one_line(arguments, message, tmp_path):
    extra = ["--out", str(tmp_path / "out")]
    done = runner.invoke(app, [*arguments, *extra])
    assert done.exit_code == 1
    assert message in done.output
    assert "Traceback" not in done.output


def test_help_does_not_load_torch():
    code = "import sys, cps.cli; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_recipe_shows_all_its_settings():
    shown = CliRunner().invoke(app, ["bench", "cifar100-10-single", "--list"]).output
    for word in ("SGD(lr=0.1", "Contrastive", "Rotations", "budget=0.01", "temperature=5.0"):
        assert word in shown, word
