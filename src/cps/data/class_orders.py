"""Class orders by name: seeds of numpy, the sorted order, and the lists that published code uses for CIFAR-100.

"Order 1993" is two orders in papers. `np.random.seed(1993)` and a permutation give 68, 56, 78, 8, 23, ..., which LUCIR,
FOSTER and PyCIL use. The order in iCaRL's own files starts with 87, 0, 52, 58, 44; it is the first of the three that
PODNet and AFC use.
"""

from collections.abc import Sequence
from difflib import get_close_matches

import numpy as np

from cps.data.examples import ClassName

# options/data/cifar100_3orders.yaml of arthurdouillard/incremental_learning.pytorch; the first one is also in
# inclearn/lib/data/datasets.py, "taken from original iCaRL implementation".
PODNET = (
    (
        87, 0, 52, 58, 44, 91, 68, 97, 51, 15, 94, 92, 10, 72, 49, 78, 61, 14, 8, 86, 84, 96, 18, 24, 32, 45, 88, 11, 4,
        67, 69, 66, 77, 47, 79, 93, 29, 50, 57, 83, 17, 81, 41, 12, 37, 59, 25, 20, 80, 73, 1, 28, 6, 46, 62, 82, 53, 9,
        31, 75, 38, 63, 33, 74, 27, 22, 36, 3, 16, 21, 60, 19, 70, 90, 89, 43, 5, 42, 65, 76, 40, 30, 23, 85, 2, 95, 56,
        48, 71, 64, 98, 13, 99, 7, 34, 55, 54, 26, 35, 39,
    ),
    (
        58, 30, 93, 69, 21, 77, 3, 78, 12, 71, 65, 40, 16, 49, 89, 46, 24, 66, 19, 41, 5, 29, 15, 73, 11, 70, 90, 63,
        67, 25, 59, 72, 80, 94, 54, 33, 18, 96, 2, 10, 43, 9, 57, 81, 76, 50, 32, 6, 37, 7, 68, 91, 88, 95, 85, 4, 60,
        36, 22, 27, 39, 42, 34, 51, 55, 28, 53, 48, 38, 17, 83, 86, 56, 35, 45, 79, 99, 84, 97, 82, 98, 26, 47, 44, 62,
        13, 31, 0, 75, 14, 52, 74, 8, 20, 1, 92, 87, 23, 64, 61,
    ),
    (
        71, 54, 45, 32, 4, 8, 48, 66, 1, 91, 28, 82, 29, 22, 80, 27, 86, 23, 37, 47, 55, 9, 14, 68, 25, 96, 36, 90, 58,
        21, 57, 81, 12, 26, 16, 89, 79, 49, 31, 38, 46, 20, 92, 88, 40, 39, 98, 94, 19, 95, 72, 24, 64, 18, 60, 50, 63,
        61, 83, 76, 69, 35, 0, 52, 7, 65, 42, 73, 74, 30, 41, 3, 6, 53, 13, 56, 70, 77, 34, 97, 75, 2, 17, 93, 33, 84,
        99, 51, 62, 87, 5, 15, 10, 78, 67, 44, 59, 85, 43, 11,
    ),
)  # fmt: skip
# inclearn/datasets/dataset.py of Rhyssiyan/DER-ClassIL.pytorch, order 0; the other four are numpy's 1993 and PODNet's.
DER = (
    62, 54, 84, 20, 94, 22, 40, 29, 78, 27, 26, 79, 17, 76, 68, 88, 3, 19, 31, 21, 33, 60, 24, 14, 6, 10, 16, 82,
    70, 92, 25, 5, 28, 9, 61, 36, 50, 90, 8, 48, 47, 56, 11, 98, 35, 93, 44, 64, 75, 66, 15, 38, 97, 42, 43, 12, 37,
    55, 72, 95, 18, 7, 23, 71, 49, 53, 57, 86, 39, 87, 34, 63, 81, 89, 69, 46, 2, 1, 73, 32, 67, 91, 0, 51, 83, 13,
    58, 80, 74, 65, 4, 30, 45, 77, 99, 85, 41, 96, 59, 52,
)  # fmt: skip
IDENTITY = "identity"  # the sorted order
NAMED = {"podnet-1": PODNET[0], "podnet-2": PODNET[1], "podnet-3": PODNET[2], "der": DER}
PAPER_ORDERS = (1993, 1605, 2022, 9999, IDENTITY)  # those of the paper, of which the published runs use the first three


def class_order(classes: Sequence[ClassName], order: int | str) -> list[ClassName]:
    """Return sorted classes in another order, given by its name or by a seed.

    The order of a seed is that of `np.random.seed(seed); np.random.permutation(n)`.
    """
    if order == IDENTITY:
        return list(classes)
    if not isinstance(order, str):
        return [classes[index] for index in np.random.RandomState(order).permutation(len(classes))]
    if order not in NAMED:
        nearest = get_close_matches(order, NAMED, n=1)
        hint = f" (did you mean {nearest[0]}?)" if nearest else ""
        raise ValueError(f"unknown class order '{order}'{hint}; choose a seed, {IDENTITY}, {', '.join(NAMED)}")
    if len(NAMED[order]) != len(classes):
        raise ValueError(
            f"the class order '{order}' is one of {len(NAMED[order])} classes, and the data has {len(classes)}; use a "
            "seed"
        )
    return [classes[index] for index in NAMED[order]]


def parse_order(text: str) -> int | str:
    """Return the seed or the name of a class order from text."""
    text = text.strip()
    if text.isdecimal():
        return int(text)
    if text not in (IDENTITY, *NAMED):
        class_order((), text)  # raises an error that names the others
    return text


def parse_orders(text: str) -> list[int | str]:
    """Return class orders from text: a number of orders, or names and seeds separated by commas.

    A number N means the first N of the paper's five, and then the seeds 0, 1, 2, ...; a seed of the paper means itself.

    >>> parse_orders("3")
    [1993, 1605, 2022]
    >>> parse_orders("podnet-1,1605")
    ['podnet-1', 1605]
    >>> parse_orders("1993")
    [1993]
    """
    names = [parse_order(part) for part in text.split(",") if part.strip()]
    if len(names) == 1 and isinstance(names[0], int) and names[0] not in PAPER_ORDERS and "," not in text:
        if not 1 <= names[0] <= 1000:
            raise ValueError(f"the number of class orders must be from 1 to 1000, got {names[0]}")
        names = [*PAPER_ORDERS, *range(names[0])][: names[0]]
    if not names:
        raise ValueError("no class order was given; pass a number of orders, or names separated by commas")
    return list(dict.fromkeys(names))
