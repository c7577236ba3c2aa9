"""What each part of the training for single images is worth: the table of docs/one-image-measured.md."""

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.records import machine_of, markdown, read

LEFT_OUT = {
    "single": "nothing",
    "upright": "turns: images are learned upright",
    "one-turn": "all turns at once: one of the four, drawn anew",
    "weak": "strong augmentation: crops by 4 pixels, flips",
    "no-contrast": "the contrastive term",
    "one-round": "two of the three rounds of pruning",
    "no-budget": "budgets: as much as pruning leaves",
}
MEASURES: dict[str, Callable[[dict[str, Any]], float]] = {
    "one image": lambda run: run["class_il"]["cascade"]["1"],
    "one image, largest output": lambda run: run["class_il"]["largest output"]["1"],
    "task found": lambda run: run["selection"]["cascade"],
    "task known": lambda run: run["task_il"],
    "AUROC of strangers": lambda run: 100 * run["strangers"]["AUROC"],
}
COSTS: dict[str, tuple[str, Callable[[dict[str, Any], dict[str, Any]], float | None]]] = {  # beside a whole run
    "weights taken": ("{:.0f}", lambda run, _: run["taken"]),
    "training time": ("{:.2f} x", lambda run, whole: run["minutes"] / whole["minutes"] if "minutes" in run else None),
    "operations an image": ("{:.0f} G", lambda run, _: run["operations"] / 1e9),
}


def ablation_table() -> str:
    """Return what a run loses by each part of the training that is left out, against whole ones in the same orders."""
    runs = _runs()
    rows = []
    for variant, what in LEFT_OUT.items():
        found = [(run, runs["single"][order]) for order, run in runs[variant].items()]
        worth = [_against([(of(run), of(whole)) for run, whole in found]) for of in MEASURES.values()]
        costs = [_mean(form, [of(*pair) for pair in found]) for form, of in COSTS.values()]
        rows.append([what, *worth, *costs, " ".join(map(str, runs[variant]))])
    head = ["left out", *MEASURES, *COSTS]
    run = next(iter(runs["single"].values()))
    note = (
        "In %, test images, the first five of ten tasks of `cifar100-10-single`; in brackets the difference to the "
        "whole recipe in the same orders, and its standard deviation. Two runs shared the GPU all the time, so times "
        "of training are ratios (orders 1993 and 1605: in order 2022 other work was on the machine). Each "
        "AUROC was kept to a whole percent; "
    )
    return markdown([*head, "orders"], rows, f"{note}{machine_of(run)}.")


def _runs() -> dict[str, dict[int, dict[str, Any]]]:
    """Return the runs with and without parts of the training, by variant and order."""
    runs: dict[str, dict[int, dict[str, Any]]] = {}
    for key, found in read("ablation-parts").items():
        how, variant = key.split(": ")
        runs.setdefault(variant, {})[int(how.split("order ")[1].split(",")[0])] = found
    return runs


def _against(pairs: list[tuple[float, float]]) -> str:
    """Return the mean of what was found, and by how much it differs from that of whole runs, with its spread."""
    mean = f"{statistics.fmean(found for found, _ in pairs):.1f}"
    differences = [found - whole for found, whole in pairs]
    if not any(differences):
        return mean
    return f"{mean} ({statistics.fmean(differences):+.1f} ± {statistics.stdev(differences):.1f})"


def _mean(form: str, values: list[float | None]) -> str:
    """Return the mean of what was measured, or nothing."""
    known = [value for value in values if value is not None]
    return form.format(statistics.fmean(known)) if known else ""
