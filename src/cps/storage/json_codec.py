"""Dataclasses as JSON data and back, with every entry checked against its type annotation."""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
SCALARS: dict[Any, tuple[str, tuple[type, ...]]] = {
    str: ("a string", (str,)),
    bool: ("true or false", (bool,)),
    int: ("an integer", (int,)),
    float: ("a number", (int, float)),
}


def to_json(value: Any) -> Any:
    """Return a dataclass and all it holds as JSON data.

    Fields that are None are left out. Keys of dictionaries become strings, and NaN in a matrix becomes null.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        entries = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {name: to_json(entry) for name, entry in entries.items() if entry is not None}
    if isinstance(value, Mapping):
        return {str(name): to_json(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(entry) for entry in value]
    if isinstance(value, np.ndarray):
        return [[None if np.isnan(entry) else entry for entry in row] for row in value.tolist()]
    return value


def from_json(kind: type[T], data: Any, name: str = "") -> T:
    """Return JSON data as a value of a type: a dataclass, or anything that its annotations contain.

    Raise `ValueError` naming the entry that is missing or has the wrong type. Unknown keys are ignored, so that files
    of newer versions load.
    """
    return _decode(kind, data, name)


def _decode(kind: Any, data: Any, name: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, data, name)
    if kind in SCALARS:
        expected, accepted = SCALARS[kind]
        is_right = isinstance(data, accepted) and isinstance(data, bool) == (kind is bool)
        return kind(data) if is_right else _fail(name, expected, data)
    if kind is Any:  # JSON data that is checked elsewhere
        return data
    arguments, origin = get_args(kind), get_origin(kind)
    if origin in (Union, types.UnionType):
        return _decode_union(arguments, data, name)
    if origin in (dict, tuple):
        return (_decode_dict if origin is dict else _decode_tuple)(arguments, data, name)
    if origin in (np.ndarray, NDArray):  # the latter from numpy 2.5 on
        return _decode_matrix(data, name)
    raise TypeError(f"{name} has a type that JSON data cannot be checked against: {kind}")


def _decode_dataclass(kind: Any, data: Any, name: str) -> Any:
    if not isinstance(data, dict):
        _fail(name or kind.__name__, "an object", data)
    types_of, values = get_type_hints(kind), {}
    for field in dataclasses.fields(kind):
        path = f"{name}.{field.name}" if name else field.name
        if field.name in data:
            values[field.name] = _decode(types_of[field.name], data[field.name], path)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"'{path}' is missing")
    return kind(**values)


def _decode_union(kinds: tuple[Any, ...], data: Any, name: str) -> Any:
    if data is None and type(None) in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    for kind in kinds[:-1]:
        try:
            return _decode(kind, data, name)
        except ValueError:
            continue
    return _decode(kinds[-1], data, name)


def _decode_dict(kinds: tuple[Any, ...], data: Any, name: str) -> dict[Any, Any]:
    key_kind, kind = kinds
    if not isinstance(data, dict):
        _fail(name, "an object", data)
    return {_decode_key(key_kind, key, name): _decode(kind, entry, f"{name}.{key}") for key, entry in data.items()}


def _decode_key(kind: Any, key: str, name: str) -> Any:
    try:
        return kind(key)
    except ValueError:
        raise ValueError(f"the keys of '{name}' must be integers, got {key!r}") from None


def _decode_tuple(kinds: tuple[Any, ...], data: Any, name: str) -> tuple[Any, ...]:
    if not isinstance(data, list):
        _fail(name, "a list", data)
    if kinds[-1] is ...:
        kinds = kinds[:1] * len(data)
    if len(data) != len(kinds):
        _fail(name, f"a list of {len(kinds)} entries", data)
    return tuple(_decode(kind, entry, f"{name}[{i}]") for i, (kind, entry) in enumerate(zip(kinds, data, strict=True)))


def _decode_matrix(data: Any, name: str) -> np.ndarray:
    try:
        matrix = np.array(data, dtype=float)  # null becomes NaN
    except (TypeError, ValueError):
        matrix = None
    if not isinstance(data, list) or matrix is None or matrix.ndim != 2:
        _fail(name, "rows of numbers of equal length", data)
    return matrix  # pyright: ignore[reportReturnType]


def _fail(name: str, expected: str, data: Any) -> Any:
    raise ValueError(f"'{name}' must be {expected}, got {repr(data)[:60]}")
