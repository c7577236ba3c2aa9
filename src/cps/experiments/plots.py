"""Pictures of results: matplotlib figures, one function each, all labelled and readable in print."""

from collections.abc import Sequence
from itertools import cycle, product
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cps.evaluation.metrics import backward_transfer, history
from cps.experiments.aggregate import common, in_words
from cps.experiments.published import PUBLISHED

Results = dict[str, Any]

KINDS = {"accuracy": "class accuracy", "selection": "selection accuracy"}
COLOURS = {"ours": "#0b5cad", "ceiling": "#4b9b5f", "other": "#d98c1f", "low": "#b8322f", "grey": "#777777"}

SELECTORS = {"Cascade": "ours", "MaxOutput": "other", "ImportanceSignature": "low", "ImportanceSignature-L1": "grey"}


def large_size(sizes: Sequence[str]) -> str:
    """Return the group size to show beside the smallest: 20, or the largest there is."""
    return "20" if "20" in sizes else sizes[-1]


def accuracy_history(results: Results) -> Figure:
    """Accuracy after each task: ours at group size 1 and at the largest, the ceiling, and the bounds."""
    figure, axes = _figure()
    tasks = range(1, len(results["classes_per_task"]) + 1)
    selector = results["default_selector"]
    by_size = results["class_il"][selector]
    sizes = list(by_size)
    axes.plot(tasks, _history(results["task_il"]), "s-", color=COLOURS["ceiling"], label="task known (task-IL)")
    for size, style in zip(dict.fromkeys((sizes[0], large_size(sizes))), ("o-", "o--"), strict=False):
        _line(axes, tasks, _history(by_size[size]), style, COLOURS["ours"], f"cps {selector}, {in_words(size)}")
    bounds = results.get("bounds", {})
    if "finetuning" in bounds:
        axes.plot(tasks, _history(bounds["finetuning"]), "v-", color=COLOURS["low"], label="finetuning")
    if "joint" in bounds:
        axes.axhline(bounds["joint"]["ACC"], color=COLOURS["grey"], linestyle=":", label="joint training, all tasks")
    _decorate(axes, "tasks learned", "mean accuracy on the tasks so far (%)")
    _count(axes, tasks)
    return figure


def matrices(results: Results, size: str) -> Figure:
    """Heatmaps: class-IL accuracy and selection accuracy on each task (column) after each task (row)."""
    entry = results["class_il"][results["default_selector"]][size]
    titles = {f"{what} (%)\ngroup size {size}": entry[key] for key, what in KINDS.items()}
    return _heatmaps(titles)


def selections(results: Results, size: str) -> Figure:
    """Heatmaps: how often each selector finds the subnetwork, on each task after each task."""
    return _heatmaps(
        {
            f"{selector}: selected (%)\ngroup size {size}": by[size]["selection"]
            for selector, by in results["class_il"].items()
        }
    )


def accuracy_on_each_task(results: Results) -> Figure:
    """Accuracy on each task after the last: no task is lost, whenever it was learned."""
    figure, axes = _figure(width=max(6.4, 0.5 * len(results["classes_per_task"])))
    selector = results["default_selector"]
    by_size = results["class_il"][selector]
    sizes = list(by_size)
    large = large_size(sizes)
    shown = {"task known (task-IL)": results["task_il"]}
    shown |= {f"cps {selector}, {in_words(size)}": by_size[size] for size in (large, sizes[0])}
    colours = (COLOURS["ceiling"], COLOURS["other"], COLOURS["ours"])
    places = np.arange(1, len(results["classes_per_task"]) + 1)
    for index, ((label, entry), colour) in enumerate(zip(shown.items(), colours, strict=False)):
        last = _array(entry["accuracy"])[-1]
        axes.bar(places + 0.28 * (index - (len(shown) - 1) / 2), last, 0.28, color=colour, label=label)
    _count(axes, range(1, len(places) + 1))
    _decorate(axes, "task", "accuracy after the last task (%)")
    _put_legend_above(axes)
    return figure


def forgetting_history(results: Results) -> Figure:
    """BWT after each task: how many points the tasks before it have lost since they were learned."""
    figure, axes = _figure()
    selector = results["default_selector"]
    by_size = results["class_il"][selector]
    sizes = list(by_size)
    shown = {"task known (task-IL)": (results["task_il"], COLOURS["ceiling"], "s-")}
    large = large_size(sizes)
    shown[f"cps {selector}, {in_words(sizes[0])}"] = (by_size[sizes[0]], COLOURS["ours"], "o-")
    if large != sizes[0]:
        shown[f"cps {selector}, {in_words(large)}"] = (by_size[large], COLOURS["ours"], "o--")
    if "finetuning" in results.get("bounds", {}):
        shown["finetuning"] = (results["bounds"]["finetuning"], COLOURS["low"], "v-")
    tasks = len(results["classes_per_task"])
    for label, (entry, colour, style) in shown.items():
        matrix = _array(entry["accuracy"])
        lost = [backward_transfer(matrix[: after + 1, : after + 1]) for after in range(1, tasks)]
        _line(axes, range(2, tasks + 1), lost, style, colour, label)
    _count(axes, range(2, tasks + 1))
    _decorate(axes, "tasks learned", "points forgotten so far (BWT)")
    axes.set_ylim(-4, None)
    return figure


def histories(runs: Sequence[Results], size: str) -> Figure:
    """Accuracy after each task of several runs: the mean, and a band of one standard deviation."""
    figure, axes = _figure()
    selectors, sizes = common(runs)
    selector = min(run["default_selector"] for run in runs)
    tasks = range(1, len(runs[0]["classes_per_task"]) + 1)
    shown = {"task known (task-IL)": ([run["task_il"] for run in runs], COLOURS["ceiling"], "s-")}
    for number, style in (("1", "o-"), (size, "o--")):
        if selector in selectors and number in sizes:
            entries = [run["class_il"][selector][number] for run in runs]
            shown[f"cps {selector}, {in_words(number)}"] = (entries, COLOURS["ours"], style)
    for label, (entries, colour, style) in shown.items():
        curves = np.array([_history(entry) for entry in entries])
        _band(axes, tasks, curves, style, colour, label)
    for number, curve in PUBLISHED.get(runs[0]["recipe"], {}).get("history", {}).items():
        if number in (size, "task-IL") and len(curve) == len(tasks):
            what = "task known" if number == "task-IL" else in_words(number)
            axes.plot(tasks, curve, ":", color=COLOURS["grey"], label=f"paper, {what} (top-5)")
    _count(axes, tasks)
    _decorate(axes, "tasks learned", "mean accuracy on the tasks so far (%)")
    return figure


def group_sizes(runs: Sequence[Results]) -> Figure:
    """Accuracy by group size of several runs, for each selector: the mean, and a band of one standard deviation."""
    figure, axes = _figure()
    selectors, sizes = common(runs)
    others = cycle(product(("o--", "o:", "o-."), SELECTORS.values()))
    for selector in selectors:
        curves = np.array([[run["class_il"][selector][size]["ACC"] for size in sizes] for run in runs])
        style, colour = ("o-", SELECTORS[selector]) if selector in SELECTORS else next(others)
        _band(axes, range(len(sizes)), curves, style, COLOURS[colour], selector)
    ceiling = float(np.mean([run["task_il"]["ACC"] for run in runs]))
    axes.axhline(ceiling, color=COLOURS["ceiling"], linestyle="--", label="task known (task-IL)")
    axes.set_xticks(range(len(sizes)), sizes)
    _decorate(axes, "images known to share a task (group size)", "accuracy after the last task (%)")
    return figure


def _band(axes: Axes, places: Sequence[int], curves: np.ndarray, style: str, colour: str, label: str) -> None:
    """Draw the mean of some curves, and a band of one standard deviation where there are several."""
    mean = curves.mean(axis=0)
    _line(axes, places, mean, style, colour, label)
    if len(curves) > 1:
        spread = curves.std(axis=0, ddof=1)
        axes.fill_between(places, mean - spread, mean + spread, color=colour, alpha=0.15, linewidth=0)


def _line(axes: Axes, places: Sequence[int], values: Any, style: str, colour: str, label: str) -> None:
    """Draw a curve; the marks of a dashed one are hollow, so that those beneath show."""
    axes.plot(places, values, style, color=colour, markerfacecolor="white" if "--" in style else colour, label=label)


def _heatmaps(matrices: dict[str, Any]) -> Figure:
    """Draw matrices (after, on) side by side."""
    tasks = len(next(iter(matrices.values())))
    side = max(3.2, 0.36 * tasks + 1.2)
    figure = Figure(figsize=(len(matrices) * side + 1.2, side + 0.3), layout="constrained")
    every = figure.subplots(1, len(matrices), squeeze=False)[0]
    for axes, (title, rows) in zip(every, matrices.items(), strict=True):
        values = _array(rows)
        picture = axes.imshow(values, vmin=0, vmax=100, cmap="viridis")
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("on task")
        axes.set_ylabel("after task")
        axes.set_xticks(range(tasks), range(1, tasks + 1), fontsize=8)
        axes.set_yticks(range(tasks), range(1, tasks + 1), fontsize=8)
        for after in range(tasks):
            for on in range(after + 1):
                colour = "black" if values[after, on] > 60 else "white"
                axes.text(on, after, f"{values[after, on]:.0f}", ha="center", va="center", color=colour, fontsize=7)
        figure.colorbar(picture, ax=axes, shrink=0.8)
    return figure


def weights_per_layer(results: Results) -> Figure:
    """Union and intersection of all subnetworks in each layer, and how many tasks share a weight."""
    layers, sharing = results["layers"], results["sharing"]
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    places = np.arange(len(layers))
    left.bar(places - 0.2, [layer["union"] for layer in layers], 0.4, color=COLOURS["ours"], label="any task (union)")
    left.bar(
        places + 0.2, [layer["intersection"] for layer in layers], 0.4,
        color=COLOURS["other"], label="every task (intersection)",
    )  # fmt: skip
    left.set_xticks(places, [layer["name"] for layer in layers], rotation=45, ha="right", fontsize=7)
    _decorate(left, "", "weights used (%)")
    _put_legend_above(left)
    right.bar(range(len(sharing)), sharing, color=COLOURS["ours"])
    _count(right, range(len(sharing)), most=12)
    right.set_xlabel("tasks that use a weight (0: still free)")
    right.set_ylabel("share of all weights (%)")
    light_grid(right)
    return figure


def taken_by_task(results: Results) -> Figure:
    """What each subnetwork uses, and what all together have taken after it."""
    figure, axes = _figure()
    tasks = range(1, len(results["subnetworks"]) + 1)
    density = [entry["density"] for entry in results["subnetworks"]]
    axes.bar(tasks, density, color=COLOURS["ours"], label="used by the task's subnetwork")
    taken = [entry["taken"] for entry in results["subnetworks"]]
    axes.plot(tasks, taken, "o-", color=COLOURS["low"], label="taken so far, all tasks together")
    _count(axes, tasks)
    _decorate(axes, "task", "share of all weights (%)")
    return figure


def _figure(width: float = 6.4) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, 3.8), layout="constrained")
    return figure, figure.subplots()


def _decorate(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_ylim(0, 104)
    light_grid(axes)
    axes.legend(fontsize=8, frameon=False, loc="best")


def _put_legend_above(axes: Axes) -> None:
    """Move the legend out of the way of bars."""
    axes.legend(fontsize=8, frameon=False, loc="lower left", ncols=3, bbox_to_anchor=(0, 1))


def _count(axes: Axes, numbers: range, most: int = 20) -> None:
    """Write numbers below the x-axis: all, or every second, fifth, ..., so that they do not touch."""
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, len(numbers)) if len(numbers) <= most * step)
    axes.set_xticks([number for number in numbers if number % step == 0])


def light_grid(axes: Axes) -> None:
    """Draw thin lines across, and no frame."""
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _array(rows: Sequence[Sequence[float | None]]) -> np.ndarray:
    return np.array([[np.nan if value is None else value for value in row] for row in rows], dtype=float)


def _history(entry: dict[str, Any]) -> list[float]:
    return history(_array(entry["accuracy"]))
