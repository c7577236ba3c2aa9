"""Arguments that several commands share: `--loader`, a function that loads a custom backbone, and `--task`."""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from cps.loading import Load
    from cps.network.shared import SharedNetwork

Loader = Annotated[
    str | None, typer.Option(help="Function that loads a model with a custom backbone, as module:function.")
]


def get_loader(name: str | None) -> "Load":
    """Return the loader with that name, from the current folder or an installed package; `cps.load` for None."""
    from cps.learner import Learner
    from cps.loading import BackboneMissing, load

    custom = None if name is None else _import_function(name)

    def load_model(path: Path, **settings: Any) -> Learner:
        if custom is None:
            try:
                return load(path, **settings)
            except BackboneMissing as error:
                raise BackboneMissing(f"{error}, in a function given with --loader") from None
        try:
            found = custom(path, **settings)
        except TypeError as error:
            raise ValueError(f"--loader '{name}' must accept a path and settings like fabric=...: {error}") from error
        if not isinstance(found, Learner):
            raise ValueError(f"--loader '{name}' must return cps.load(path, backbone, **settings), got {found!r}")
        return found

    return load_model


def _import_function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # a user's module may raise anything
        raise ValueError(f"--loader must be module:function, got '{name}' ({error})") from error
    if not callable(found):
        raise ValueError(f"--loader must be module:function, got '{name}', which is {found!r}")
    return found


def check_task_number(task: int, network: "SharedNetwork") -> None:
    """Raise `ValueError` unless `task` is the number of a learned task, counted from 1."""
    known = len(network.subnetworks)
    if not 1 <= task <= known:
        raise ValueError(f"task must be between 1 and {known}, the number of learned tasks, got {task}")
