"""Files that are written, replaced or abandoned by several processes at once."""

import json
import os
import subprocess
import sys

import pytest
import torch

from cps.storage import atomic
from cps.storage import container as storage


def test_a_full_disk_raises_an_error_with_the_file_name_and_keeps_the_old_file(tmp_path):
    path = tmp_path / "graph.onnx"
    path.write_text("old")

    def fail():
        with atomic.atomic_write(path) as partial:
            partial.write_text("half of the n")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match=r"could not write '.*graph\.onnx' \(.*No space left.*untouched"):
        fail()
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["graph.onnx"]


@pytest.mark.slow
def test_equal_content_gives_equal_bytes_in_every_process(tmp_path):
    """Each process may order the metadata differently, so one process is not enough to see this."""
    code = "import sys; from cps.storage import container; container.write(sys.argv[1], 'test', {'b': 1, 'a': 2}, {})"
    for name in ("one", "two", "three", "four"):
        subprocess.run([sys.executable, "-c", code, str(tmp_path / name)], check=True)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1
    assert storage.read(tmp_path / "one", "test")[0] == {"b": 1, "a": 2}


def test_two_simultaneous_writers_both_write_whole_files(tmp_path):
    path = tmp_path / "file"
    with atomic.atomic_write(path) as first:
        first.write_text("the first")
        with atomic.atomic_write(path) as second:
            second.write_text("the second one")
        assert path.read_text() == "the second one"
    assert path.read_text() == "the first"
    assert list(tmp_path.iterdir()) == [path]


def test_partial_files_of_killed_writers_are_removed_and_recent_ones_are_kept(tmp_path):
    path = tmp_path / "model.cps"
    old, new, other = (tmp_path / f".{name}.partial" for name in ("model.cps.0a", "model.cps.0b", "other.cps.0c"))
    for file in (old, new, other):
        file.touch()
    for file in (old, other):
        os.utime(file, (0, 0))
    atomic.write_text(path, "text")
    assert set(tmp_path.iterdir()) == {path, new, other}
    os.utime(new, (0, 0))
    atomic.remove(path)
    assert set(tmp_path.iterdir()) == {other}


def test_a_file_that_is_replaced_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    path = tmp_path / "file"
    storage.write(path, "model", {}, {"old": torch.ones(2)})
    parse, calls = storage._parse_header, []

    def replace_and_parse(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            other = tmp_path / "other"
            storage.write(other, "model", {}, {"new": torch.ones(3)})
            other.replace(path)
            raise storage.FileError("parts of both")
        return parse(*arguments)

    monkeypatch.setattr(storage, "_parse_header", replace_and_parse)
    assert list(storage.read(path, "model")[1]) == ["new"]
    assert len(calls) == 2


def test_json_is_written_to_the_target_of_a_symbolic_link(tmp_path):
    (tmp_path / "real.json").write_text("{}")
    (tmp_path / "link.json").symlink_to("real.json")
    atomic.write_json(tmp_path / "link.json", {"a": 1})
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text()) == {"a": 1}
