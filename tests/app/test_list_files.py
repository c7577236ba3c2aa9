"""Listing the files of a folder."""

import os
import shutil

from cps.app.list_files import file_states


def test_a_folder_that_vanishes_during_the_listing_hides_no_others(tmp_path, monkeypatch):
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "image.png").write_bytes(b"x")
    real = os.scandir

    def scandir(path):
        if str(path).endswith("b") and (tmp_path / "b").exists():
            shutil.rmtree(tmp_path / "b")
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    found = {path.parent.name for path in file_states(tmp_path) if path.name == "image.png"}
    assert found == {"a", "c"}
