"""Counts of held-out images: accuracy of each class, confused pairs, and the picture of the matrix."""

from xml.etree import ElementTree

from cps.app.class_accuracy import ClassAccuracy, ConfusedPair, counted, read_confusion

TRUE = ["bolt"] * 4 + ["nut"] * 3 + ["pin"] * 2
PREDICTED = ["bolt", "nut", "nut", "pin", "nut", "bolt", "nut", "pin", "nut"]


def confusion(**notes):
    return read_confusion([(["bolt", "nut"], {"confusion": counted(None, TRUE, PREDICTED), **notes}), (["pin"], {})])


def test_accuracy_and_pairs_are_counted_by_hand():
    assert confusion().classes == [ClassAccuracy("bolt", 1, 4), ClassAccuracy("nut", 2, 3), ClassAccuracy("pin", 1, 2)]
    assert confusion().pairs == [
        ConfusedPair("bolt", "nut", 3),
        ConfusedPair("bolt", "pin", 1),
        ConfusedPair("nut", "pin", 1),
    ]


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


def test_the_picture_has_a_square_for_each_count_and_hostile_names_are_text():
    name = "<script>alert(1)</script>"
    found = read_confusion([([name, "nut"], {"confusion": {name: {"nut": 1, name: 3}}})])
    picture = ElementTree.fromstring(found.picture())
    squares = [each for each in picture.iter() if each.tag.endswith("rect") and list(each)]
    assert sorted(float(square.get("fill-opacity")) for square in squares) == [0.25, 0.75]
    assert not [each for each in picture.iter() if each.tag.endswith("script")]


def test_many_classes_have_a_picture_without_names():
    names = [f"class {index}" for index in range(200)]
    picture = read_confusion([(names, {"confusion": {name: {name: 3} for name in names}})]).picture()
    assert "<text" not in picture
    assert picture.count("<rect") == 202
