"""The documentation as a site: it builds without warnings, and every link in it leads somewhere."""

import importlib.util
import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest

import cps

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for package in ("mkdocs", "material", "mkdocstrings_handlers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip("needs the extra 'docs'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


@pytest.mark.slow
def test_every_link_of_the_site_leads_to_a_file_and_its_anchor(site):
    """To a file and not to its folder, so that the pages can be read without a server."""
    checked = 0
    for page in site.rglob("*.html"):
        for link in re.findall(r'(?:href|src)="([^"]*)"', page.read_text(encoding="utf-8")):
            address, _, anchor = unquote(unescape(link)).partition("#")
            if re.match(r"[a-z]+:", address) or page.name == "404.html":
                continue
            target = (page.parent / address).resolve() if address else page
            assert target.is_file(), f"{page}: {link}"
            if anchor and not anchor.startswith("__"):
                assert f'id="{anchor}"' in target.read_text(encoding="utf-8"), f"{page}: {link}"
            checked += 1
    assert checked > 500


@pytest.mark.slow
def test_the_reference_has_every_public_name(site):
    page = (site / "reference.html").read_text(encoding="utf-8")
    documented = {anchor.rpartition(".")[2] for anchor in re.findall(r'id="cps\.([\w.]+)"', page)}
    assert set(cps.__all__) - documented <= {"metrics"}
    assert "<blockquote>" not in page  # an example of a docstring that is not shown as code
