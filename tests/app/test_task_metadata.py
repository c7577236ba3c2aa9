"""The notes that `cps learn` stores, as text."""

import pytest

from cps.app.task_metadata import accuracy_text


@pytest.mark.parametrize(("known", "is_reported"), [(0.5, True), (0.51, False)])
def test_an_accuracy_no_better_than_guessing_is_reported(known, is_reported):
    notes = {"accuracy": {"task known": known, "task found": 0.3}, "held out": 10, "classes": {"a": 5, "b": 5}}
    assert ("no better than guessing" in accuracy_text(notes)) == is_reported
