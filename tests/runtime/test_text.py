"""Formatting for messages."""

import pytest

from cps.runtime.text import (
    first_line,
    format_bytes,
    format_count,
    format_duration,
    join_names,
    quote_names,
    shorten_names,
)


def test_counts_have_a_noun_and_thousands_separators():
    assert [format_count(n, "image") for n in (0, 1, 1200)] == ["0 images", "1 image", "1,200 images"]


@pytest.mark.parametrize(("number", "text"), [(0, "1 MiB"), (3 * 2**20, "3 MiB"), (3 * 2**29, "1.5 GiB")])
def test_sizes_are_in_binary_units(number, text):
    assert format_bytes(number) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "1 s"), (89, "89 s"), (90, "2 min"), (5400, "1.5 h")])
def test_durations_are_rough(seconds, text):
    assert format_duration(seconds) == text


def test_long_lists_of_names_are_cut():
    names = list("abcdefghij")
    assert join_names(names[:2]) == "a, b"
    assert join_names(names) == "a, b, c, d, e, f, g, h and 2 more"
    assert quote_names(names, limit=2) == "'a', 'b', ..."
    assert quote_names(names[:1]) == "'a'"
    assert shorten_names(["a", 1]) == "('a', 1)"
    assert shorten_names(names) == "('a', 'b', 'c', 'd', 'e', 'f', ...)"


def test_the_first_line_of_an_empty_error_is_its_type():
    assert first_line(ValueError("first\nsecond")) == "first"
    assert first_line(KeyboardInterrupt()) == "KeyboardInterrupt"
