"""Counts of images by true and predicted class: accuracy of each class, confused pairs, and the picture."""

from xml.etree import ElementTree

from cps.evaluation.confusion import ClassAccuracy, ConfusedPair, Confusion

TRUE = ["bolt"] * 4 + ["nut"] * 3 + ["pin"] * 2
PREDICTED = ["bolt", "nut", "nut", "pin", "nut", "bolt", "nut", "pin", "nut"]


def test_accuracy_and_pairs_are_counted_by_hand():
    confusion = Confusion.of(["bolt", "nut", "pin", 7], TRUE, PREDICTED)
    assert confusion.classes == [
        ClassAccuracy("bolt", 1, 4),
        ClassAccuracy("nut", 2, 3),
        ClassAccuracy("pin", 1, 2),
        ClassAccuracy("7", 0, 0),
    ]
    assert confusion.pairs == [
        ConfusedPair("bolt", "nut", 3),
        ConfusedPair("bolt", "pin", 1),
        ConfusedPair("nut", "pin", 1),
    ]


def test_the_picture_has_a_square_for_each_count_and_hostile_names_are_text():
    name = "<script>alert(1)</script>"
    picture = ElementTree.fromstring(Confusion((name, "nut"), {name: {"nut": 1, name: 3}}).picture())
    squares = [each for each in picture.iter() if each.tag.endswith("rect") and list(each)]
    assert sorted(float(square.get("fill-opacity")) for square in squares) == [0.25, 0.75]
    assert not [each for each in picture.iter() if each.tag.endswith("script")]


def test_many_classes_have_a_picture_without_names():
    names = tuple(f"class {index}" for index in range(200))
    picture = Confusion(names, {name: {name: 3} for name in names}).picture()
    assert "<text" not in picture
    assert picture.count("<rect") == 202
