"""What benchmarks/results holds, and how it is written down."""

import json
from pathlib import Path
from typing import Any

from cps.experiments.aggregate import mean_and_spread

PAPER = ("cifar100-5", "cifar100-10", "cifar100-20", "cifar100-b50", "cifar100-b50-frozen", "cub200")
ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def read(name: str) -> dict[str, Any]:
    """Return the results of a published run."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def published_runs(*recipes: str) -> list[dict[str, Any]]:
    """Return the published runs of some recipes, or of all of the paper's, by recipe and order."""
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*-*.json"))]
    runs = [run for run in found if run.get("recipe") in (recipes or PAPER) and "class_il" in run]
    return sorted(runs, key=lambda run: ((recipes or PAPER).index(run["recipe"]), str(run["order"])))


def ran_on(runs: list[dict[str, Any]]) -> str:
    """Return where runs were made, and what is said about them."""
    devices = " and ".join(sorted({machine_of(run) for run in runs}))
    recipes = len({run["recipe"] for run in runs})
    if len(runs) > recipes:
        return f"Mean and standard deviation over class orders; {devices}."
    return f"One run{' each' if recipes > 1 else ''}; {devices}."


def machine_of(run: dict[str, Any]) -> str:
    """Return where a run was made."""
    return f"{run['device']}, torch {run['versions']['torch']}"


def reached(runs: list[dict[str, Any]], selector: str, size: str) -> str:
    """Return the mean accuracy of runs and its spread."""
    return mean_and_spread([run["class_il"][selector][size]["ACC"] for run in runs])


def markdown(head: list[str], rows: list[list[str]], note: str) -> str:
    """Return a table with a note below it."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join([*lines, "", note])
