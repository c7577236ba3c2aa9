"""Dataclasses as JSON data and back."""

import json
from dataclasses import dataclass

import numpy as np
import pytest

from cps.storage.json_codec import from_json, to_json


@dataclass(frozen=True)
class Inner:
    matrix: np.ndarray[tuple[int, int], np.dtype[np.float64]]
    name: str | int = ""


@dataclass(frozen=True)
class Outer:
    inner: Inner
    by_size: dict[int, float]
    flags: tuple[bool, ...] = ()
    pair: tuple[int, str] | None = None


def test_a_value_survives_the_round_trip():
    outer = Outer(Inner(np.array([[1.5, np.nan], [2.0, 3.0]]), 7), {1: 0.5, 20: 1.0}, (True, False), (1, "a"))
    data = to_json(outer)
    assert data == {
        "inner": {"matrix": [[1.5, None], [2.0, 3.0]], "name": 7},
        "by_size": {"1": 0.5, "20": 1.0},
        "flags": [True, False],
        "pair": [1, "a"],
    }
    again = from_json(Outer, json.loads(json.dumps(data, allow_nan=False)))
    np.testing.assert_array_equal(again.inner.matrix, outer.inner.matrix)
    assert (again.by_size, again.flags, again.pair) == (outer.by_size, outer.flags, outer.pair)


def test_none_is_left_out_and_read_as_the_default():
    outer = Outer(Inner(np.zeros((1, 1))), {})
    assert "pair" not in to_json(outer)
    assert from_json(Outer, to_json(outer)).pair is None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "'inner' is missing"),
        ({"inner": 5, "by_size": {}}, "'inner' must be an object, got 5"),
        ({"inner": {"matrix": [1]}, "by_size": {}}, "'inner.matrix' must be rows of numbers"),
        ({"inner": {"matrix": [[0]], "name": 0.5}, "by_size": {}}, "'inner.name' must be an integer, got 0.5"),
        ({"inner": {"matrix": [[0]]}, "by_size": {"1": "x"}}, "'by_size.1' must be a number, got 'x'"),
        ({"inner": {"matrix": [[0]]}, "by_size": {"x": 1}}, "keys of 'by_size' must be integers, got 'x'"),
        ({"inner": {"matrix": [[0]]}, "by_size": {}, "flags": [1]}, r"'flags\[0\]' must be true or false, got 1"),
        ({"inner": {"matrix": [[0]]}, "by_size": {}, "pair": [1]}, "'pair' must be a list of 2 entries"),
    ],
)
def test_wrong_data_is_rejected_with_its_place(data, message):
    with pytest.raises(ValueError, match=message):
        from_json(Outer, data)
