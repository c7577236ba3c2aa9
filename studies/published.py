"""Read and write the published results in benchmarks/results, and format them as Markdown."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import RESULTS

from cps.experiments.aggregate import format_mean
from cps.experiments.results import Results, read_results
from cps.storage.atomic import write_text

ROOT = Path(__file__).parent.parent
PAPER_RECIPES = ("cifar100-5", "cifar100-10", "cifar100-20", "cifar100-b50", "cifar100-b50-frozen", "cub200")


def read_json(name: str) -> dict[str, Any]:
    """Return the content of a published file that is not a results.json."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def read_run(name: str) -> Results:
    """Return the results of a published run."""
    return read_results(RESULTS / f"{name}.json")


def published_runs(*recipes: str) -> list[Results]:
    """Return the published runs of some recipes (default: those of the paper), sorted by recipe and order."""
    recipes = recipes or PAPER_RECIPES
    paths = sorted({path for recipe in recipes for path in RESULTS.glob(f"{recipe}-*.json")})
    runs = [run for run in map(read_results, paths) if run.recipe in recipes]
    return sorted(runs, key=lambda run: (recipes.index(run.recipe), str(run.order)))


def write_compact(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file with numbers rounded to two decimals, and one line for each key."""
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
        return round(value, 2)
    if isinstance(value, dict):
        return {key: _round(entry) for key, entry in value.items()}
    return [_round(entry) for entry in value] if isinstance(value, list) else value
