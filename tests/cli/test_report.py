"""The page of `cps bench` and `cps report`."""

import json
import shutil
import subprocess

import pytest

from commands import run_cps

pytestmark = pytest.mark.slow  # the run takes long
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def test_the_page_is_self_contained(digits_run):
    page = (digits_run[0] / "report.html").read_text()
    assert page.count("<svg") == page.count("<figure>") == 11
    assert "http://" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )
    assert "<script" not in page
    assert 'src="' not in page


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_opens_in_a_browser(digits_run, tmp_path):
    shot = tmp_path / "page.png"
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}",
        "--window-size=1100,1600", f"--screenshot={shot}", "--virtual-time-budget=3000", (digits_run[0] / "report.html").as_uri(),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert shot.stat().st_size > 20_000
    dump = subprocess.run(
        [*command[:-3], "--dump-dom", command[-1]], check=True, capture_output=True, timeout=120, text=True
    ).stdout
    assert dump.count("</svg>") == 11


def test_one_page_covers_several_runs_and_duplicates_count_once(digits_run, tmp_path):
    page, other = tmp_path / "page.html", tmp_path / "other.json"
    other.write_text(json.dumps(json.loads((digits_run[0] / "results.json").read_text()) | {"seed": 5}))
    run_cps("report", digits_run[0], other, "--out", page)
    assert page.read_text().count("<h1>") == 3  # one of them about both
    result = run_cps("report", digits_run[0], digits_run[0] / "results.json", "--out", page)
    assert "1 of the runs are duplicates and are counted once" in result.output.replace("\n", " ")
    assert page.read_text().count("<h1>") == 1
