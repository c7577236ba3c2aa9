"""Settings as plain data: what a model file may hold of how a model was learned.

The list of types is closed: those that are marked with `@setting` in the running program. A file can name no
others, and nothing that a file names is imported.
"""

import dataclasses
import math
import re
from contextlib import suppress
from numbers import Real
from typing import Any, TypeVar, get_args, get_origin

import numpy as np

Kind = TypeVar("Kind", bound=type)
NUMBERS = {bool: "True or False", int: "a whole number", float: "a number"}

_TYPES: dict[str, type] = {}


@dataclasses.dataclass(frozen=True)
class Unknown:
    """A setting that a file could not hold; `was` is how it printed."""

    was: str


def setting(kind: Kind) -> Kind:
    """Mark a frozen dataclass as a setting that model files can hold, by the name of the class.

    Use it on your own pruner, selector, optimizer, schedule or augmentation, to have `cps.load` restore it.
    """
    if not hasattr(kind, "__dataclass_fields__"):
        raise TypeError(f"a setting is a dataclass; put @dataclass(frozen=True) below @setting of {kind.__name__}")
    known = _TYPES.setdefault(kind.__name__, kind)
    if known.__module__ != kind.__module__:
        raise ValueError(f"there is a setting named {kind.__name__} already; give yours another name")
    _TYPES[kind.__name__] = kind
    return kind


class Numbers:
    """Settings that are numbers: what says `int` is whole, what says `float` is finite, what says `bool` is one.

    Of tuples every number is; lists and arrays become tuples, and numpy's numbers Python's own, which files can hold.
    """

    def __post_init__(self) -> None:
        this: Any = self
        for field in dataclasses.fields(this):
            value, what = getattr(self, field.name), f"{field.name} of {type(self).__name__}"
            if get_origin(field.type) is tuple:
                value = _several(value, what, get_args(field.type))
            elif field.type in NUMBERS:
                value = _number(value, what, field.type)
            object.__setattr__(self, field.name, value)

    def _must_be(self, what: str, name: str, *, is_so: bool) -> None:
        """Refuse a number that is none of those it may be, by its name."""
        if not is_so:
            raise ValueError(f"{name} of {type(self).__name__} is {what}, got {getattr(self, name)!r}")


def _several(values: Any, what: str, kinds: tuple[Any, ...]) -> Any:
    """Return numbers of some kind as a tuple: so many, or any number where the last kind is `...`."""
    if kinds[0] not in NUMBERS:
        return values
    is_row = hasattr(values, "__len__") and not isinstance(values, str | bytes)
    if not is_row or (kinds[-1] is not ... and len(values) != len(kinds)):
        raise ValueError(f"{what} are {'' if kinds[-1] is ... else f'{len(kinds)} '}numbers in a tuple, got {values!r}")
    return tuple(_number(value, what, kinds[0]) for value in values)


def _number(value: Any, what: str, kind: Any) -> bool | int | float:
    """Return a number as one of Python's own."""
    is_truth = isinstance(value, bool | np.bool_)
    if kind is bool and (is_truth or (isinstance(value, int) and value in (0, 1))):
        return bool(value)
    with suppress(OverflowError):  # of whole numbers that are too large for any use
        if kind is not bool and isinstance(value, Real) and not is_truth:
            number = int(value) if isinstance(value, int | np.integer) else float(value)
            if math.isfinite(number) and (kind is float or number == int(number)):
                return number if kind is float else int(number)
    raise ValueError(f"{what} is {NUMBERS[kind]}, got {value!r}")


def encode(value: Any) -> Any:
    """Return a setting as plain JSON data; what is no setting becomes a note of what it was."""
    if isinstance(value, (bool, int, float, str)) or value is None:
        return value
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    if _TYPES.get(type(value).__name__) is type(value):
        fields = {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    return {"type": None, "was": printed(repr(value))[:200]}


def printed(value: Any) -> str:
    """Return how something prints, without the address that it may print with, which is no identity."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def decode(value: Any) -> Any:
    """Return the setting that `encode` made plain, or `Unknown`; raise `ValueError` for a damaged one."""
    if isinstance(value, list):
        return tuple(decode(item) for item in value)
    if not isinstance(value, dict):
        return value
    if value.get("type") is None:
        return Unknown(str(value.get("was")))
    kind = _TYPES.get(value["type"]) if isinstance(value["type"], str) else None
    if kind is None:
        return Unknown(str(value["type"]))
    fields = {name: decode(item) for name, item in value.items() if name != "type"}
    lost = [was for item in fields.values() for was in unknown_in(item)]
    if lost:
        return Unknown(lost[0])
    try:
        return kind(**fields)
    except Exception as error:  # what a stranger's values do to a constructor is not foreseen
        raise ValueError(f"damaged setting {value['type']}: {error}") from None


def unknown_in(value: Any) -> list[str]:
    """Return what could not be restored of a decoded setting, as it printed."""
    if isinstance(value, Unknown):
        return [value.was]
    return [was for item in value for was in unknown_in(item)] if isinstance(value, tuple) else []
