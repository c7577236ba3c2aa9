"""What a comparison of methods measured, and the results.json that holds it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cps.evaluation.metrics import Metrics
from cps.storage.atomic import write_json
from cps.storage.json_codec import from_json, to_json


@dataclass(frozen=True, kw_only=True)
class MethodResult:
    """One method on one class order.

    `method` is its name on the command line, `name` that in tables. `class_il` has the metrics by selector and group
    size; `selector` is the one for single images, `group_selector` that for groups. `kept` are bytes, by what they are.
    """

    method: str
    name: str
    order: int | str
    seed: int
    assumes: dict[str, bool]
    settings: dict[str, Any]
    selector: str
    group_selector: str
    classes_per_task: tuple[int, ...]
    task_il: Metrics
    class_il: dict[str, dict[int, Metrics]]
    kept: dict[str, int]
    kept_while_learning: dict[str, int]
    image_passes: int
    seconds: float
    device: str
    versions: dict[str, str]

    @property
    def is_joint(self) -> bool:
        """Whether it was measured after the last task only."""
        return len(self.task_il.accuracy) < len(self.classes_per_task)

    @property
    def ways(self) -> dict[str, tuple[str, str]]:
        """The ways to predict: the selectors for single images and for groups, by a name, "" if there is one way.

        Where one selector does both, the method has outputs of every task on its own, and each selector is a way. A
        head for all classes together needs none on single images, and its groups are selected in the method's own way.
        """
        names = list(self.class_il) if self.selector == self.group_selector else [self.selector]
        if len(names) == 1:
            return {"": (self.selector, self.group_selector)}
        return {name: (name, name) for name in dict.fromkeys([self.selector, *names])}

    def metrics(self, size: int, way: str = "") -> Metrics | None:
        """Return the metrics for a group size in one of the `ways`; None if it was not measured."""
        one, group = self.ways.get(way) or (self.selector, self.group_selector)
        return self.class_il.get(one if size == 1 else group, {}).get(size)


@dataclass(frozen=True)
class Failure:
    """A method that failed on a class order, and the error."""

    method: str
    order: int | str
    error: str


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Several methods on the tasks of a recipe, each on one class order or more.

    `budget` is "equal" if the training steps of all methods see the same number of images, `passes` times those of a
    task, or "own" if every method was trained as it was published.
    """

    recipe: str
    budget: str
    passes: int | None = None
    memory: str | None = None
    results: tuple[MethodResult, ...] = ()
    failures: tuple[Failure, ...] = field(default=())

    @property
    def methods(self) -> dict[str, list[MethodResult]]:
        """The results of each method."""
        names = dict.fromkeys(result.method for result in self.results)
        return {name: [each for each in self.results if each.method == name] for name in names}

    @property
    def orders(self) -> list[int | str]:
        """The class orders of all results."""
        return list(dict.fromkeys(result.order for result in self.results))

    @property
    def group_sizes(self) -> list[int]:
        """The group sizes that any method was measured at."""
        return sorted({size for each in self.results for by_size in each.class_il.values() for size in by_size})

    def write(self, path: Path) -> None:
        """Write results.json."""
        write_json(path, to_json(self))


def read_comparison(path: Path) -> Comparison:
    """Read the results.json of a comparison; raise `ValueError` if it is damaged or something else."""
    try:
        return from_json(Comparison, json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ValueError(f"no comparison at '{path}'; pass the folder of one, or its results.json") from None
    except ValueError as error:
        raise ValueError(f"'{path}' holds no comparison of methods: {error}") from None


def is_comparison(path: Path) -> bool:
    """Return True if a results.json holds a comparison rather than a single run."""
    try:
        return "results" in json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def merge_comparisons(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return one comparison for each recipe, budget and memory; a method that comes twice on an order counts once."""
    merged: dict[tuple[Any, ...], Comparison] = {}
    for each in comparisons:
        key = (each.recipe, each.budget, each.passes, each.memory)
        if key not in merged:
            merged[key] = each
            continue
        known = {(result.method, result.order, result.seed) for result in merged[key].results}
        new = [result for result in each.results if (result.method, result.order, result.seed) not in known]
        merged[key] = replace(merged[key], results=(*merged[key].results, *new))
    return list(merged.values())
