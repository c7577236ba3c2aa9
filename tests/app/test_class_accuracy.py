"""Counts of held-out images in the notes of tasks."""

from cps.app.class_accuracy import counted, read_confusion
from cps.evaluation.confusion import ClassAccuracy

TRUE = ["bolt"] * 4 + ["nut"] * 3 + ["pin"] * 2
PREDICTED = ["bolt", "nut", "nut", "pin", "nut", "bolt", "nut", "pin", "nut"]


def confusion(**notes):
    return read_confusion([(["bolt", "nut"], {"confusion": counted(None, TRUE, PREDICTED), **notes}), (["pin"], {})])


def test_counts_of_later_folders_are_added():
    once, twice = counted(None, TRUE, PREDICTED), counted(counted(None, TRUE, PREDICTED), TRUE, PREDICTED)
    assert twice == {true: {name: 2 * count for name, count in row.items()} for true, row in once.items()}


def test_notes_of_another_form_and_unknown_names_are_ignored():
    assert confusion(confusion="much").classes == [ClassAccuracy(name, 0, 0) for name in ("bolt", "nut", "pin")]
    odd = {"bolt": {"bolt": -1, "nut": "3", "gone": 4}, "gone": {"bolt": 2}, "nut": [1]}
    assert confusion(confusion=odd).counts == {}


def test_versions_of_a_class_are_one_class():
    tasks = [(["bolt"], {"confusion": {"bolt": {"bolt": 1}}}), (["bolt"], {"confusion": {"bolt": {"bolt": 2}}})]
    assert read_confusion(tasks).classes == [ClassAccuracy("bolt", 3, 3)]
