"""What a comparison of methods measured: its results.json, and its tables."""

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cps.evaluation.metrics import Metrics, history
from cps.experiments.aggregate import Table, format_mean
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

    def metrics(self, size: int) -> Metrics | None:
        """Return the metrics for a group size, with the method's own selector; None if it was not measured."""
        return self.class_il[self.selector if size == 1 else self.group_selector].get(size)


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
    results: tuple[MethodResult, ...] = field(default=())

    @property
    def methods(self) -> dict[str, list[MethodResult]]:
        """The results of each method."""
        names = dict.fromkeys(result.method for result in self.results)
        return {name: [each for each in self.results if each.method == name] for name in names}

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


def comparison_table(comparison: Comparison, *, group_size: int = 20) -> Table:
    """Return the table of all methods: accuracy, forgetting, and what each keeps, costs and assumes."""
    rows = []
    for same in comparison.methods.values():
        one, group = ([each.metrics(size) for each in same] for size in (1, group_size))
        curves = [
            statistics.fmean(history(metrics.accuracy, each.classes_per_task))
            for each, metrics in zip(same, one, strict=True)
            if metrics is not None and not each.is_joint
        ]
        sequential = [metrics for each, metrics in zip(same, one, strict=True) if not each.is_joint]
        rows.append(
            [
                same[0].name,
                _mean(one, lambda metrics: metrics.ACC),
                _mean(group, lambda metrics: metrics.ACC),
                format_mean([each.task_il.ACC for each in same]),
                _mean(sequential, lambda metrics: metrics.AIA),
                format_mean(curves) if curves else "",
                _mean(sequential, lambda metrics: metrics.BWT),
                _mebibytes(sum(each.kept.values()) for each in same),
                f"{statistics.fmean(each.image_passes for each in same):,.0f}",
                f"{statistics.fmean(each.seconds for each in same):,.0f}",
                ", ".join(name.replace("_", " ") for name, holds in same[0].assumes.items() if holds),
                str(len(same)),
            ]
        )
    head = [
        "method", "one image", f"groups of {group_size}", "task known", "AIA", "AIA over images", "BWT", "kept (MiB)",
        "image passes", "seconds", "assumes", "orders",
    ]  # fmt: skip
    return head, rows


def _mean(metrics: Sequence[Metrics | None], value: Callable[[Metrics], float]) -> str:
    """Return the mean of a value, or nothing if some of the metrics are missing."""
    present = [each for each in metrics if each is not None]
    return format_mean([value(each) for each in present]) if present and len(present) == len(metrics) else ""


def _mebibytes(sizes: Iterable[int]) -> str:
    return f"{statistics.fmean(sizes) / 2**20:.2f}"
