"""Forms: what each setting of a learner may be, whether somebody passes it or a file holds it."""

from collections.abc import Callable
from typing import Any

from cps.data.normalize import Normalize
from cps.network.capacity import Capacity
from cps.selection.base import is_selector
from cps.training.settings import Training


def _is_count(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool) and 0 <= value < 2**63


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)


FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {  # None where the learner has a default
    "pruner": (lambda value: value is None or _is_function(value), "an object such as cps.NNrelief(), or a function"),
    "rounds": (_is_count, "a whole number, 0 or more"),
    "train": (lambda value: value is None or isinstance(value, Training), "a cps.Training"),
    "retrain": (lambda value: value is None or isinstance(value, Training), "a cps.Training"),
    "selectors": (
        lambda value: isinstance(value, tuple) and bool(value) and all(map(is_selector, value)),
        "a tuple of objects such as cps.Cascade()",
    ),
    "augment": (lambda value: value is None or _is_function(value), "an object such as cps.Flip(), or a function"),
    "rotations": (
        lambda value: value is None or (_is_function(value) and hasattr(value, "num_rotations")),
        "an object such as cps.Rotations()",
    ),
    "normalize": (lambda value: value is None or isinstance(value, Normalize), "a cps.Normalize"),
    "prune_images": (lambda value: _is_count(value) and value > 0, "a whole number, 1 or more"),
    "capacity": (lambda value: value is None or isinstance(value, Capacity), "a cps.Capacity"),
    "seed": (_is_count, "a whole number, 0 or more"),
    "watch": (lambda value: value is None or _is_function(value), "a function of the progress"),
}
SETTINGS = tuple(name for name in FORMS if name != "watch")  # those that a file holds
COUNTS = ("rounds", "prune_images", "seed")


def check_forms(**settings: Any) -> None:
    """Refuse a setting of another kind, such as a class instead of one of its objects."""
    for name, value in settings.items():
        is_right, what = FORMS[name]
        if not is_right(value):
            kind = ValueError if isinstance(value, int) and name in COUNTS else TypeError
            is_class = " (the class, not one of its objects)" if isinstance(value, type) else ""
            raise kind(f"{name} cannot be {repr(value)[:80]}{is_class}; it is {what}")
