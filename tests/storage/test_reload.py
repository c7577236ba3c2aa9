"""A file is loaded again when it changes; a file that fails to load changes nothing."""

import pytest

from cps.storage import reload
from cps.storage.reload import ReloadedFile


def test_a_file_that_failed_to_load_is_tried_again_and_its_problem_is_logged_once(tmp_path, monkeypatch, caplog):
    path, loads = tmp_path / "model.cps", []

    def load():
        loads.append(path.read_text())
        if 2 <= len(loads) <= 3:
            raise MemoryError("no memory is left")
        return loads[-1]

    path.write_text("first")
    reloaded = ReloadedFile(path, load)
    path.write_text("second, longer")
    assert not reloaded.refresh()
    assert (reloaded.value, reloaded.problem) == ("first", "no memory is left")
    assert not reloaded.refresh()  # too early
    assert len(loads) == 2
    monkeypatch.setattr(reload, "RETRY_SECONDS", -1.0)
    assert [reloaded.refresh() for _ in range(3)] == [False, True, False]
    assert (reloaded.value, reloaded.problem) == ("second, longer", None)
    assert caplog.text.count("no memory is left") == 1


def test_an_unchanged_file_is_not_loaded_again(tmp_path):
    path, loads = tmp_path / "file", []
    path.write_text("text")
    reloaded = ReloadedFile(path, lambda: loads.append(path.read_text()) or len(loads))
    assert not reloaded.refresh()
    path.write_text("other text")
    assert reloaded.refresh()
    assert reloaded.value == len(loads) == 2


def test_a_removed_file_keeps_its_value(tmp_path):
    path = tmp_path / "file"
    path.write_text("text")
    reloaded = ReloadedFile(path, path.read_text)
    path.unlink()
    assert not reloaded.refresh()
    assert reloaded.value == "text"
    assert "No such file" in reloaded.problem


def test_the_first_load_raises(tmp_path):
    with pytest.raises(FileNotFoundError):
        ReloadedFile(tmp_path / "nothing", (tmp_path / "nothing").read_text)
