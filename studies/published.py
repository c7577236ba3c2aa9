"""Read and write the published results in benchmarks/results, and format them as Markdown."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks import RESULTS

from cps.experiments.aggregate import format_mean
from cps.experiments.results import Results, read_results
from cps.methods.closed_form_metrics import ClosedFormMetrics
from cps.storage.atomic import write_text
from cps.storage.json_codec import from_json

ROOT = Path(__file__).parent.parent
PAPER_RECIPES = ("cifar100-5", "cifar100-10", "cifar100-20", "cifar100-b50", "cifar100-b50-frozen", "cub200")


def read_json(name: str) -> dict[str, Any]:
    """Return the content of a published file that is not a results.json."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def read_run(name: str) -> Results:
    """Return the results of a published run, with the closed form of the same tasks."""
    return with_closed_form(read_results(RESULTS / f"{name}.json"))


def published_runs(*recipes: str) -> list[Results]:
    """Return the published runs of some recipes (default: those of the paper), sorted by recipe and order."""
    recipes = recipes or PAPER_RECIPES
    paths = sorted({path for recipe in recipes for path in RESULTS.glob(f"{recipe}-*.json")})
    runs = [with_closed_form(run) for run in map(read_results, paths) if run.recipe in recipes]
    return sorted(runs, key=lambda run: (recipes.index(run.recipe), str(run.order)))


@lru_cache
def closed_forms() -> dict[str, dict[str, Any]]:
    """Return what `studies.closed_forms` measured, by data and space."""
    return read_json("closed-forms")


def closed_form_of(run: Results) -> dict[str, Any] | None:
    """Return what the closed form reaches on the tasks of a run, if it was measured."""
    return closed_form_run(f"{re.sub('-(single|frozen)$', '', run.recipe)}-{run.order}")


def closed_form_run(key: str) -> dict[str, Any] | None:
    """Return what the closed form in the default space for these images reaches on the tasks RECIPE-ORDER.

    Only runs in default spaces have matrices in the file.
    """
    default = [
        entry["runs"] for entry in closed_forms().values() if any("metrics" in run for run in entry["runs"].values())
    ]
    return next((runs[key] for runs in default if key in runs), None)


def closed_form_accuracy(runs: Sequence[Results], size: int) -> str:
    """Return the mean accuracy of the closed form on the tasks of some runs, or nothing if it was not measured."""
    found = [entry["ACC"][str(size)] for run in runs if (entry := closed_form_of(run)) is not None]
    return format_mean(found) if len(found) == len(runs) else ""


def with_closed_form(run: Results) -> Results:
    """Return a run with the closed form of the same tasks, which was measured later."""
    entry = closed_form_of(run)
    if run.bounds.closed_form is not None or entry is None or "metrics" not in entry:
        return run
    metrics = from_json(ClosedFormMetrics, entry["metrics"])
    metrics = replace(metrics, class_il={size: metrics.class_il[size] for size in run.group_sizes})
    return replace(run, bounds=replace(run.bounds, closed_form=metrics))


def describe_closed_form(run: Results) -> str:
    """Return the sentence about the closed form of a run."""
    closed = run.bounds.closed_form
    if closed is None:
        return ""
    flips = ", mirror images added to the sums" if closed.flips else ""
    return f"Closed form: {closed.classifier} on {closed.space}{flips}, chosen on held-out images; nothing is trained."


def write_compact(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file with numbers rounded to two decimals or two digits, and one line for each key."""
    lines = [f" {json.dumps(key)}: {json.dumps(_round(value))}" for key, value in content.items()]
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def describe_machine(device: str, versions: Mapping[str, str]) -> str:
    """Return the device and the version of torch."""
    return f"{device}, torch {versions['torch']}"


def describe_runs(runs: Sequence[Results]) -> str:
    """Return the sentence about what the numbers of some runs are, and on which machine they ran."""
    machines = " and ".join(sorted({describe_machine(run.device, run.versions) for run in runs}))
    recipes = len({run.recipe for run in runs})
    if len(runs) > recipes:
        return f"Mean and standard deviation over class orders; {machines}."
    return f"One run{' each' if recipes > 1 else ''}; {machines}."


def mean_accuracy(runs: Sequence[Results], selector: str, size: int) -> str:
    """Return the mean accuracy of runs with the standard deviation."""
    return format_mean([run.class_il[selector][size].ACC for run in runs])


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], note: str) -> str:
    """Return a Markdown table with a note below it."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join([*lines, "", note])


def _round(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 2) if abs(value) >= 0.1 else float(f"{value:.2g}")
    if isinstance(value, dict):
        return {key: _round(entry) for key, entry in value.items()}
    return [_round(entry) for entry in value] if isinstance(value, list) else value
