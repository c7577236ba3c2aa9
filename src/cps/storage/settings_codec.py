"""Settings as plain JSON data, for model files and checkpoints.

A file can only name types that the running program has marked with `@setting`. Nothing that a file names is imported.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from numbers import Real
from typing import Any, TypeVar, get_args, get_origin

import numpy as np

Kind = TypeVar("Kind", bound=type)
NUMBERS = {bool: "True or False", int: "an integer", float: "a finite number"}
RENAMED_SETTINGS = {"views": "rotations"}  # names that files of version 0.1 use -> names since
RENAMED_TYPES = {"Builtin": "Architecture"}
LATER_SETTINGS: dict[str, Any] = {
    "trunk": None,
    "map_copies": 8,
}  # that files of earlier versions lack, and what they stand for

_TYPES: dict[str, type] = {}


@dataclasses.dataclass(frozen=True)
class Unknown:
    """A setting that a file could not hold; `was` is its repr."""

    was: str


def setting(kind: Kind) -> Kind:
    """Register a frozen dataclass as a setting that model files store under its class name.

    Use it on your own pruner, selector, optimizer, schedule or augmentation, so that `cps.load` can restore it. A
    class attribute `RENAMED` maps field names in old files to the present ones.
    """
    if not hasattr(kind, "__dataclass_fields__"):
        raise TypeError(f"@setting needs a dataclass; put @dataclass(frozen=True) below @setting of {kind.__name__}")
    known = _TYPES.setdefault(kind.__name__, kind)
    if known.__module__ != kind.__module__:
        raise ValueError(f"a setting named {kind.__name__} already exists; rename yours")
    _TYPES[kind.__name__] = kind
    return kind


class NumericSettings:
    """Base of setting dataclasses: checks every field annotated `bool`, `int`, `float` or a tuple of one of them.

    Numpy numbers become Python numbers, and lists and arrays become tuples, so that files can hold them.
    """

    def __post_init__(self) -> None:
        this: Any = self
        for field in dataclasses.fields(this):
            value, name = getattr(self, field.name), f"{field.name} of {type(self).__name__}"
            if get_origin(field.type) is tuple:
                value = _as_tuple(value, name, get_args(field.type))
            elif field.type in NUMBERS:
                value = _as_number(value, name, field.type)
            object.__setattr__(self, field.name, value)

    def _require(self, name: str, holds: bool, *, must: str) -> None:
        """Raise `ValueError` for the field `name` unless `holds`; `must` completes "must be ..."."""
        if not holds:
            raise ValueError(f"{name} of {type(self).__name__} must be {must}, got {getattr(self, name)!r}")


def _as_tuple(values: Any, name: str, kinds: tuple[Any, ...]) -> Any:
    """Return a tuple of numbers, of any length if the last of `kinds` is `...`."""
    if kinds[0] not in NUMBERS:
        return values
    is_sequence = hasattr(values, "__len__") and not isinstance(values, str | bytes)
    if not is_sequence or (kinds[-1] is not ... and len(values) != len(kinds)):
        raise ValueError(
            f"{name} must be a tuple of {'' if kinds[-1] is ... else f'{len(kinds)} '}numbers, got {values!r}"
        )
    return tuple(_as_number(value, name, kinds[0]) for value in values)


def _as_number(value: Any, name: str, kind: Any) -> bool | int | float:
    """Return a number as Python's own type."""
    is_bool = isinstance(value, bool | np.bool_)
    if kind is bool and (is_bool or (isinstance(value, int) and value in (0, 1))):
        return bool(value)
    with suppress(OverflowError):  # integers too large for a float
        if kind is not bool and isinstance(value, Real) and not is_bool:
            number = int(value) if isinstance(value, int | np.integer) else float(value)
            if math.isfinite(number) and (kind is float or number == int(number)):
                return number if kind is float else int(number)
    raise ValueError(f"{name} must be {NUMBERS[kind]}, got {value!r}")


def encode(value: Any) -> Any:
    """Return a setting as JSON data; an unregistered object becomes a record of its repr."""
    if isinstance(value, (bool, int, float, str)) or value is None:
        return value
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    if _TYPES.get(type(value).__name__) is type(value):
        fields = {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    return {"type": None, "was": stable_str(repr(value))[:200]}


def stable_str(value: Any) -> str:
    """Return `str(value)` without memory addresses, which differ between runs."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def decode(value: Any) -> Any:
    """Return the setting that `encode` encoded, or `Unknown`; raise `ValueError` if it is damaged."""
    if isinstance(value, list):
        return tuple(decode(item) for item in value)
    if not isinstance(value, dict):
        return value
    if value.get("type") is None:
        return Unknown(str(value.get("was")))
    value = upgrade(value)
    kind = _TYPES.get(value["type"]) if isinstance(value["type"], str) else None
    if kind is None:
        return Unknown(str(value["type"]))
    fields = {name: decode(item) for name, item in value.items() if name != "type"}
    lost = [was for item in fields.values() for was in unknown_in(item)]
    if lost:
        return Unknown(lost[0])
    try:
        return kind(**fields)
    except Exception as error:  # a hostile file may pass anything to a constructor
        raise ValueError(f"damaged setting {value['type']}: {error}") from None


def upgrade(value: Any) -> Any:
    """Return encoded data with the names of types and fields in old files replaced by the present ones."""
    if isinstance(value, list):
        return [upgrade(item) for item in value]
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("type"), str):
        value = {**value, "type": RENAMED_TYPES.get(value["type"], value["type"])}
    kind = _TYPES.get(value["type"]) if isinstance(value.get("type"), str) else None
    renamed: Mapping[str, str] = getattr(kind, "RENAMED", {})
    return {renamed.get(name, name): upgrade(item) for name, item in value.items()}


def upgrade_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the encoded settings of a learner under their present names, with those that early files lack."""
    present = {RENAMED_SETTINGS.get(name, name): upgrade(value) for name, value in settings.items()}
    return {**LATER_SETTINGS, **present}


def contains_setting(value: Any, kind: type) -> bool:
    """Return True if a setting, or anything inside it, is an instance of `kind`."""
    if isinstance(value, kind):
        return True
    if isinstance(value, (tuple, list)):
        return any(contains_setting(item, kind) for item in value)
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else ()
    return any(contains_setting(getattr(value, field.name), kind) for field in fields)


def unknown_in(value: Any) -> list[str]:
    """Return the reprs of what could not be restored of a decoded setting."""
    if isinstance(value, Unknown):
        return [value.was]
    return [was for item in value for was in unknown_in(item)] if isinstance(value, tuple) else []
