"""Settings as plain data: what a model file may hold of how a model was learned.

The list of types is closed: those that are marked with `@setting` in the running program. A file can name no
others, and nothing that a file names is imported.
"""

import dataclasses
import math
import re
from numbers import Real
from typing import Any, TypeVar

Kind = TypeVar("Kind", bound=type)

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
    """Settings that are numbers: what says `int` is whole, what says `float` is finite, what says `bool` is one."""

    def __post_init__(self) -> None:
        this: Any = self
        for field in dataclasses.fields(this):
            value, what = getattr(self, field.name), f"{field.name} of {type(self).__name__}"
            if field.type is bool and not isinstance(value, bool):
                raise ValueError(f"{what} is True or False, got {value!r}")
            if field.type in (int, float):
                object.__setattr__(self, field.name, _number(value, what, is_whole=field.type is int))


def _number(value: Any, what: str, *, is_whole: bool) -> int | float:
    """Return a number as one of Python's own, which files can hold."""
    is_number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or (is_whole and not float(value).is_integer()):
        raise ValueError(f"{what} is a {'whole ' if is_whole else ''}number, got {value!r}")
    return value if isinstance(value, int) else int(float(value)) if is_whole else float(value)


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
