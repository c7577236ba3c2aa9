"""Loaders: how commands open a model, one of a network of the user's own too."""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from cps.loading import Load

Loader = Annotated[str | None, typer.Option(help="module:function that opens a model, where its network is your own.")]


def loader_of(name: str | None) -> "Load":
    """Return the function that opens a model: the one of that name, of the folder one is in or installed, or ours."""
    if name is None:
        from cps.loading import load

        return load
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--loader names a function as module:function, got '{name}' ({error})") from None
    finally:
        sys.path.remove(os.getcwd())
    return found
