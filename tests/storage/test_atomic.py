"""Atomic writes beyond what tests/invariants/test_model_file.py claims."""

import json
from pathlib import Path

import pytest

from cps.storage.atomic import _replace, atomic_write, file_version, remove_temporary, write_json, write_text


def test_an_error_in_the_block_leaves_the_old_file_and_no_temporary_one(tmp_path):
    path = tmp_path / "file"
    write_text(path, "old")

    def fail():
        with atomic_write(path) as temporary:
            temporary.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_json_without_a_json_form_is_refused_before_anything_is_written(tmp_path):
    path = tmp_path / "results.json"
    write_json(path, {"accuracy": 0.5})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"accuracy": float("nan")})
    assert json.loads(path.read_text()) == {"accuracy": 0.5}


def test_folders_are_created_and_an_error_names_the_folder(tmp_path):
    write_text(tmp_path / "a" / "b" / "file", "text")
    with pytest.raises(OSError, match=r"cannot write in '.*/a/b/file'"):
        write_text(tmp_path / "a" / "b" / "file" / "c", "text")


def test_each_replacement_is_another_version(tmp_path):
    path = tmp_path / "file"
    assert file_version(path) is None
    write_text(path, "same")
    first = file_version(path)
    assert file_version(path) == first
    write_text(path, "same")
    assert file_version(path) != first


def test_temporary_files_are_removed_by_age(tmp_path):
    temporary = tmp_path / ".model[1].cps.0a.partial"
    temporary.touch()
    remove_temporary(tmp_path / "model[1].cps")
    assert temporary.exists()
    remove_temporary(tmp_path / "model[1].cps", min_age=0)
    assert not temporary.exists()


class ReadFile(type(Path())):
    """A path whose file others are reading, so that Windows does not let it be replaced the first times."""

    refusals = 2

    def replace(self, target):
        if self.refusals:
            self.refusals -= 1
            raise PermissionError(13, "it is being used by another process")
        return super().replace(target)


def test_replacing_waits_for_readers_but_not_forever(tmp_path):
    path, temporary = tmp_path / "file", ReadFile(tmp_path / "temporary")
    temporary.write_text("new")
    with pytest.raises(PermissionError):
        _replace(temporary, path, seconds=0.0)
    assert temporary.refusals == 1
    _replace(temporary, path, seconds=10.0)
    assert path.read_text() == "new"
    assert not temporary.exists()
