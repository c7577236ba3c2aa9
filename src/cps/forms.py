"""Forms: what each setting of a learner may be, whether somebody passes it or a file holds it."""

from collections.abc import Callable
from typing import Any

from cps.capacity import Capacity
from cps.pixels import Normalize
from cps.settings import Training


def _is_count(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool) and 0 <= value < 2**63


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)


def is_selector(value: Any) -> bool:
    """Say whether something can select."""
    return _is_function(value) and hasattr(value, "observe")


FORMS: dict[str, Callable[[Any], bool]] = {  # None where the learner has a default
    "pruner": lambda value: value is None or _is_function(value),
    "rounds": _is_count,
    "train": lambda value: value is None or isinstance(value, Training),
    "retrain": lambda value: value is None or isinstance(value, Training),
    "selectors": lambda value: isinstance(value, tuple) and bool(value) and all(map(is_selector, value)),
    "augment": lambda value: value is None or _is_function(value),
    "views": lambda value: value is None or (_is_function(value) and hasattr(value, "turns")),
    "normalize": lambda value: value is None or isinstance(value, Normalize),
    "prune_images": lambda value: _is_count(value) and value > 0,
    "capacity": lambda value: value is None or isinstance(value, Capacity),
    "seed": _is_count,
}
SETTINGS = tuple(FORMS)


def check_forms(**settings: Any) -> None:
    """Refuse a setting of another kind, such as a class instead of one of its objects."""
    for name, value in settings.items():
        if not FORMS[name](value):
            raise TypeError(f"{name} cannot be {str(value)[:80]!r}")
