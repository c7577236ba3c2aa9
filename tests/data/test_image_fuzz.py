"""A short part of fuzz/images.py: the same few hundred damaged files in every run."""

from collections import Counter

import pytest
from fuzz.images import cases, outcome, seeds

from cps.data import decode as decoding


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_image_is_read_or_refused_and_nothing_else(tmp_path, seed):
    found = Counter()
    for suffix, content in cases(200, 1000 + seed):
        path = tmp_path / f"case.{suffix}"
        path.write_bytes(content)
        found[outcome(path)] += 1
    assert min(found["pixels"], found["refused"]) > 20


def test_every_picture_that_the_cases_start_from_is_read(tmp_path):
    for suffix, content in seeds():
        path = tmp_path / f"whole.{suffix}"
        path.write_bytes(content)
        assert outcome(path) == "pixels", suffix


def test_negative_control_a_reader_that_raises_something_else_is_found(tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(b"broken")
    monkeypatch.setattr(decoding, "ImageError", KeyError)
    with pytest.raises(KeyError):
        outcome(tmp_path / "a.png")
