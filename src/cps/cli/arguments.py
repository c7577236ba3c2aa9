"""Arguments that several commands share: those of experiments, `--loader` and `--task`."""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from cps.experiments.recipes import Recipe
    from cps.loading import Load
    from cps.network.shared import SharedNetwork

Loader = Annotated[
    str | None, typer.Option(help="Function that loads a model with a custom backbone, as module:function.")
]
DataFolder = Annotated[Path | None, typer.Option(help="Folder of the data set, if the recipe needs one.")]
Weights = Annotated[Path | None, typer.Option(help="File with pretrained weights, if the recipe uses them.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of everything but the class order.")]
GroupSizes = Annotated[str | None, typer.Option(help="Group sizes to evaluate, for example 1,5,20.")]
EpochsScale = Annotated[float, typer.Option(help="Factor for the number of epochs, for a short trial.")]
Tasks = Annotated[int | None, typer.Option(min=1, help="Number of tasks to learn, for a short trial.")]
Accelerator = Annotated[str, typer.Option(help="cpu, cuda, mps or auto.")]
Precision = Annotated[
    str | None,
    typer.Option(help="32-true, bf16-mixed or 16-mixed. Default: bf16-mixed on a GPU, 32-true on a CPU."),
]


def find_recipe(name: str, *, weights: Path | None = None, epochs_scale: float = 1.0) -> "Recipe":
    """Return the recipe with that name and scaled epochs; raise `ValueError` for options that do not fit it."""
    from cps.experiments.recipes import RECIPES

    if name not in RECIPES:
        raise ValueError(f"unknown recipe '{name}'; choose from: {', '.join(RECIPES)}")
    if not 0 < epochs_scale < 1000:
        raise ValueError(f"--epochs-scale must be above 0 and below 1000, got {epochs_scale}")
    recipe = RECIPES[name]().with_scaled_epochs(epochs_scale)
    if weights is not None and recipe.pretrained is None:
        raise ValueError(f"the recipe '{name}' starts from random weights; run it without --weights")
    return recipe


def parse_sizes(text: str | None) -> list[int] | None:
    """Return group sizes from text, or None for None."""
    if text is None:
        return None
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--group-sizes must be integers separated by commas, such as 1,5,20, got '{text}'") from None
    if min(sizes) < 1:
        raise ValueError(f"--group-sizes must be at least 1, got {min(sizes)}")
    return sorted(set(sizes))


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
