"""Loaders: how commands open a model, one of a network of the user's own too."""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from cps.loading import Load

Loader = Annotated[str | None, typer.Option(help="module:function that opens a model, where its network is your own.")]


def loader_of(name: str | None) -> "Load":
    """Return the function that opens a model: the one of that name, of the folder one is in or installed, or ours."""
    from cps.learner import Learner
    from cps.loading import BackboneMissing, load

    own = None if name is None else _imported(name)

    def opened(path: Path, **settings: Any) -> Learner:
        if own is None:
            try:
                return load(path, **settings)
            except BackboneMissing as error:
                raise BackboneMissing(f"{error}, by a function that --loader names") from None
        try:
            found = own(path, **settings)
        except TypeError as error:
            raise ValueError(f"--loader '{name}' must take a path and settings, as fabric=...: {error}") from error
        if not isinstance(found, Learner):
            raise ValueError(f"--loader '{name}' must return cps.load(path, backbone, **settings), got {found!r}")
        return found

    return opened


def _imported(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # whatever importing somebody's module does
        raise ValueError(f"--loader names a function as module:function, got '{name}' ({error})") from error
    if not callable(found):
        raise ValueError(f"--loader names a function as module:function, got '{name}', which is {found!r}")
    return found
