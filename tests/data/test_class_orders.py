"""Class orders by name."""

import numpy as np
import pytest

import cps
from cps.data.class_orders import DER, NAMED, PAPER_ORDERS, PODNET, class_order, parse_order, parse_orders

IMAGES, LABELS = np.zeros((100, 3), dtype=np.float32), np.arange(100)


@pytest.mark.parametrize("name", NAMED)
def test_every_named_order_is_a_permutation_of_one_hundred_classes(name):
    assert sorted(NAMED[name]) == list(range(100))
    assert class_order([f"class {index:02}" for index in range(100)], name)[0] == f"class {NAMED[name][0]:02}"


def test_the_orders_of_published_code_start_as_papers_say():
    assert [order[:5] for order in (*PODNET, DER)] == [
        (87, 0, 52, 58, 44),
        (58, 30, 93, 69, 21),
        (71, 54, 45, 32, 4),
        (62, 54, 84, 20, 94),
    ]
    assert len({*PODNET, DER}) == 4


def test_order_1993_is_that_of_numpy_and_not_that_of_icarls_files():
    drawn = class_order(list(range(100)), 1993)
    assert drawn[:5] == [68, 56, 78, 8, 23]
    assert drawn != class_order(list(range(100)), "podnet-1")


def test_a_scenario_has_the_name_of_its_order():
    scenario = cps.split_by_class((IMAGES, LABELS), sizes=50, order="podnet-2")
    assert scenario.order == "podnet-2"
    assert scenario[0].classes == PODNET[1][:50]
    assert cps.split_by_class((IMAGES, LABELS), sizes=50, order="identity")[0].classes == tuple(range(50))


def test_a_number_means_the_orders_of_the_paper_and_then_seeds():
    assert parse_orders("5") == list(PAPER_ORDERS)
    assert parse_orders("7") == [*PAPER_ORDERS, 0, 1]
    assert parse_orders("2022") == [2022]
    assert parse_orders("3,") == [3]
    assert parse_orders("identity, der,7,der") == ["identity", "der", 7]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("podnet1", r"unknown class order 'podnet1' \(did you mean podnet-1\?\)"),
        ("1993,x", "choose a seed, identity, podnet-1"),
        ("0", "must be from 1 to 1000, got 0"),
        (" , ", "no class order was given"),
    ],
)
def test_wrong_orders_raise(text, match):
    with pytest.raises(ValueError, match=match):
        parse_orders(text)


def test_a_named_order_does_not_fit_other_data():
    assert parse_order(" der ") == "der"
    with pytest.raises(ValueError, match="is one of 100 classes, and the data has 10; use a seed"):
        class_order(list(range(10)), "der")
