"""Comparison: several runs of a recipe, with other orders or seeds but trained alike, as one mean and spread."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cps.evaluation.metrics import history
from cps.experiments.published import PUBLISHED

Results = dict[str, Any]


def by_recipe(runs: Sequence[Results]) -> dict[str, list[Results]]:
    """Return the runs of each recipe that were trained alike, and what they measured with mirror images apart."""
    same_recipe = {run["recipe"]: [other for other in runs if other["recipe"] == run["recipe"]] for run in runs}
    differing = {recipe: _differing(same) for recipe, same in same_recipe.items()}
    kinds = {recipe: {_kind(run, differing[recipe]) for run in same} for recipe, same in same_recipe.items()}

    def name_of(run: Results) -> str:
        recipe = run["recipe"]
        return recipe if len(kinds[recipe]) == 1 else f"{recipe} ({_kind(run, differing[recipe])})"

    groups: dict[str, list[Results]] = {}
    for run in runs:
        groups.setdefault(name_of(run), []).append(run)
    for run in runs:
        if run.get("flips"):
            groups.setdefault(f"{name_of(run)}, flips", []).append({**run, **run["flips"], "bounds": {}})
    return groups


def training_of(run: Results) -> str:
    """Return in words how a run was trained, as far as it says."""
    if "epochs" not in run:
        return "epochs not noted"
    first, again = run["epochs"]
    return f"{first} + {run['rounds']} x {again} epochs, {run['precision']}"


def _differing(runs: Sequence[Results]) -> dict[str, set[str]]:
    """Return the settings in which runs differ, with all values there are; schedules follow the number of epochs."""
    if not all("settings" in run for run in runs):
        return {}
    every = dict.fromkeys(name for run in runs for name in run["settings"])
    names = [name for name in every if not name.endswith("schedule")]
    values = {name: {run["settings"][name] for run in runs if name in run["settings"]} for name in names}
    return {name: found for name, found in values.items() if len(found) > 1}


def _kind(run: Results, settings: Mapping[str, set[str]]) -> str:
    words = [f"{len(run['classes_per_task'])} tasks", training_of(run)]
    warned = {
        name: _unlike(run["settings"][name], values) for name, values in settings.items() if name in run["settings"]
    }
    return ", ".join([*words, *(f"{name} {value}" for name, value in warned.items())])


def _unlike(value: str, values: set[str]) -> str:
    """Return the parts of a setting that others do not have, or all of it."""
    common = set.intersection(*({*other.split(", ")} for other in values))
    return ", ".join(part for part in value.split(", ") if part not in common) or value


def mean_and_spread(values: Sequence[float]) -> str:
    """Return the mean, with the standard deviation where there are several values."""
    mean = statistics.fmean(values)
    return f"{mean:.1f} ± {statistics.stdev(values):.1f}" if len(values) > 1 else f"{mean:.1f}"


def accuracy_table(runs: Sequence[Results]) -> tuple[list[str], list[list[str]]]:
    """Return the head and rows of accuracy by group size: of each recipe and selector, and of the bounds."""
    sizes = sorted({int(size) for run in runs for by_size in run["class_il"].values() for size in by_size})
    rows = []
    for name, same in by_recipe(runs).items():
        rows.append(
            [name, "task known", str(len(same)), *[mean_and_spread([r["task_il"]["ACC"] for r in same])] * len(sizes)]
        )
        for selector in dict.fromkeys(name for run in same for name in run["class_il"]):
            found = [run["class_il"][selector] for run in same if selector in run["class_il"]]
            cells = [_cell([entry[str(size)]["ACC"] for entry in found if str(size) in entry], found) for size in sizes]
            rows.append([name, selector, str(len(found)), *cells])
        for bound in ("finetuning", "joint"):
            known = [run for run in same if bound in run.get("bounds", {})]
            if known:
                cells = [mean_and_spread([r["bounds"][bound]["ACC"] for r in known]), *[""] * (len(sizes) - 1)]
                rows.append([name, bound, str(len(known)), *cells])
    return ["recipe", "selector", "runs", *map(str, sizes)], rows


def metrics_table(runs: Sequence[Results]) -> tuple[list[str], list[list[str]]]:
    """Return the head and rows of ACC, AIA, BWT and selection accuracy at a few group sizes, and the paper's AIA.

    These are means over tasks, but for one column; the paper's AIA counts all images alike.
    """
    rows = []
    for name, same in by_recipe(runs).items():
        selectors, sizes = common(same)
        chosen = sorted({run["default_selector"] for run in same} & set(selectors))
        for selector, size in [(name, size) for name in chosen for size in ("1", "20", "60") if size in sizes]:
            entries = [run["class_il"][selector][size] for run in same]
            cells = [mean_and_spread([entry[key] for entry in entries]) for key in ("ACC", "AIA", "BWT")]
            cells.insert(2, _over_images_if_other(same, entries))
            selected = mean_and_spread([_mean(entry["selection"][-1]) for entry in entries])
            top5 = mean_and_spread([entry["top5"] for entry in entries]) if all("top5" in e for e in entries) else ""
            rows.append([name, selector, size, *cells, selected, top5, _paper(same[0]["recipe"], size)])
    head = ["recipe", "selector", "group size", "ACC", "AIA", "AIA over images", "BWT", "selection", "top-5", "paper"]
    return head, rows


def over_images(run: Results, rows: Sequence[Sequence[float | None]]) -> list[float]:
    """Return the accuracy over all images of the classes so far, after each task, from that on each task."""
    return history(np.array(rows, dtype=float), run["classes_per_task"])


def _over_images_if_other(runs: Sequence[Results], entries: Sequence[Results]) -> str:
    """Return the AIA over images, where tasks are of different sizes."""
    if len(set(runs[0]["classes_per_task"])) == 1:
        return ""
    each = [over_images(run, entry["accuracy"]) for run, entry in zip(runs, entries, strict=True)]
    return mean_and_spread([statistics.fmean(accuracy) for accuracy in each])


def in_words(size: str) -> str:
    """Return what a group size means."""
    return "one image" if size == "1" else f"groups of {size}"


def row_table(runs: Sequence[Results], size: str) -> tuple[list[str], list[list[str]]]:
    """Return the head and rows of the accuracy on each task after the last: the task known, and by each selector."""
    columns: dict[str, list[str]] = {}
    for name, same in by_recipe([{**run, "flips": {}} for run in runs]).items():
        entries = {"task known": [run["task_il"] for run in same]}
        selectors, sizes = common(same)
        for selector in selectors if size in sizes else []:
            entries[f"{selector}, {in_words(size)}"] = [run["class_il"][selector][size] for run in same]
        for label, known in entries.items():
            last = zip(*(entry["accuracy"][-1] for entry in known), strict=True)
            columns[f"{name}, {label}"] = [mean_and_spread(values) for values in last]
    tasks = max(len(cells) for cells in columns.values())
    rows = [
        [str(task + 1), *(cells[task] if task < len(cells) else "" for cells in columns.values())]
        for task in range(tasks)
    ]
    return ["task", *columns], rows


def _paper(recipe: str, size: str) -> str:
    known = PUBLISHED.get(recipe, {})
    if "BWT" in known and size == "60":
        return f"AIA over images {known['AIA']} ± {known.get('AIA spread', '?')}, BWT {known.get('BWT', '?')}"
    if size in known.get("history", {}):
        return f"{known['history'][size][-1]:.1f} ({known['what']})"
    return ""


def _cell(values: Sequence[float], runs: Sequence[Results]) -> str:
    """Return a mean and spread, and of how many runs, where they are not all."""
    of = f" ({len(values)} of {len(runs)} runs)" if len(values) < len(runs) else ""
    return f"{mean_and_spread(values)}{of}" if values else ""


def common(runs: Sequence[Results]) -> tuple[list[str], list[str]]:
    """Return the selectors and the group sizes that all runs have."""
    selectors = [name for name in runs[0]["class_il"] if all(name in run["class_il"] for run in runs)]
    every = [by_size for run in runs for name, by_size in run["class_il"].items() if name in selectors]
    return selectors, [size for size in (every[0] if every else []) if all(size in by_size for by_size in every)]


def _mean(values: Sequence[float | None]) -> float:
    return statistics.fmean([value for value in values if value is not None])
