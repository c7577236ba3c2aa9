"""Plots of results: one function for each matplotlib figure, all with labelled axes and readable in print."""

from collections.abc import Mapping, Sequence
from itertools import cycle, product

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cps.evaluation.metrics import Matrix, Metrics, backward_transfer, history
from cps.experiments.aggregate import (
    closed_forms,
    common_selectors_and_sizes,
    describe_group_size,
    large_group_size,
)
from cps.experiments.published import PUBLISHED
from cps.experiments.results import Results

COLOURS = {
    "ours": "#0b5cad",
    "ours_too": "#6fa8dc",
    "upper_bound": "#4b9b5f",
    "other": "#d98c1f",
    "low": "#b8322f",
    "grey": "#777777",
    "closed_form": "#7a4ea3",
}
SELECTOR_COLOURS = {
    "Fusion": "ours",
    "SharedSpace": "closed_form",
    "Cascade": "ours_too",
    "MaxOutput": "other",
    "ImportanceSignature": "low",
    "ImportanceSignature-L1": "grey",
}
TASK_KNOWN = "task known (task-IL)"


def plot_accuracy_history(results: Results) -> Figure:
    """Plot the accuracy after each task: ours for two group sizes, with the task known, and the bounds."""
    figure, axes = _figure()
    tasks = range(1, results.num_tasks + 1)
    axes.plot(tasks, history(results.task_il.accuracy), "s-", color=COLOURS["upper_bound"], label=TASK_KNOWN)
    for size, style in zip(_shown_sizes(results), ("o-", "o--"), strict=False):
        curve = history(results.default_metrics[size].accuracy)
        _line(axes, tasks, curve, style, COLOURS["ours"], _our_label(results, size))
    for label, (by_size,) in closed_forms([results]).items():
        size = results.group_sizes[0]
        if size in by_size:
            curve, name = history(by_size[size].accuracy), f"{label}, {describe_group_size(size)}"
            axes.plot(tasks, curve, "D-", color=COLOURS["closed_form"], markersize=4, label=name)
    if results.bounds.finetuning is not None:
        curve = history(results.bounds.finetuning.accuracy)
        axes.plot(tasks, curve, "v-", color=COLOURS["low"], label="finetuning")
    if results.bounds.joint is not None:
        label = "joint training on all tasks"
        axes.axhline(results.bounds.joint.ACC, color=COLOURS["grey"], linestyle=":", label=label)
    _decorate(axes, "tasks learned", "mean accuracy on the tasks so far (%)")
    _number_ticks(axes, tasks)
    return figure


def plot_matrices(results: Results, size: int) -> Figure:
    """Plot heatmaps of class accuracy and selection accuracy on each task (column) after each task (row)."""
    metrics = results.default_metrics[size]
    matrices = {f"class accuracy (%)\ngroup size {size}": metrics.accuracy}
    if metrics.selection is not None:
        matrices[f"selection accuracy (%)\ngroup size {size}"] = metrics.selection
    return _heatmaps(matrices)


def plot_selection(results: Results, size: int) -> Figure:
    """Plot heatmaps of the selection accuracy of each selector on each task (column) after each task (row)."""
    found = {selector: by_size[size].selection for selector, by_size in results.class_il.items() if size in by_size}
    return _heatmaps(
        {
            f"{selector}: selection accuracy (%)\ngroup size {size}": selection
            for selector, selection in found.items()
            if selection is not None
        }
    )


def plot_final_accuracy(results: Results) -> Figure:
    """Plot the accuracy on each task after the last one, as bars."""
    tasks = results.num_tasks
    figure, axes = _figure(width=max(6.4, 0.5 * tasks))
    smallest, large = results.group_sizes[0], large_group_size(results.group_sizes)
    shown = {TASK_KNOWN: results.task_il}
    shown |= {_our_label(results, size): results.default_metrics[size] for size in (large, smallest)}
    colours = (COLOURS["upper_bound"], COLOURS["other"], COLOURS["ours"])
    places = np.arange(1, tasks + 1)
    for index, ((label, metrics), colour) in enumerate(zip(shown.items(), colours, strict=False)):
        offset = 0.28 * (index - (len(shown) - 1) / 2)
        axes.bar(places + offset, metrics.accuracy[-1], 0.28, color=colour, label=label)
    _number_ticks(axes, range(1, tasks + 1))
    _decorate(axes, "task", "accuracy after the last task (%)")
    _put_legend_above(axes)
    return figure


def plot_forgetting(results: Results) -> Figure:
    """Plot the BWT after each task: how many points the earlier tasks have lost since they were learned."""
    figure, axes = _figure()
    shown: dict[str, tuple[Metrics, str, str]] = {TASK_KNOWN: (results.task_il, COLOURS["upper_bound"], "s-")}
    for size, style in zip(_shown_sizes(results), ("o-", "o--"), strict=False):
        shown[_our_label(results, size)] = (results.default_metrics[size], COLOURS["ours"], style)
    if results.bounds.finetuning is not None:
        shown["finetuning"] = (results.bounds.finetuning, COLOURS["low"], "v-")
    ends = range(2, results.num_tasks + 1)
    for label, (metrics, colour, style) in shown.items():
        lost = [backward_transfer(metrics.accuracy[:end, :end]) for end in ends]
        _line(axes, ends, lost, style, colour, label)
    _number_ticks(axes, ends)
    _decorate(axes, "tasks learned", "accuracy lost so far (BWT, points)")
    axes.set_ylim(-4, None)
    return figure


def plot_mean_history(runs: Sequence[Results], size: int) -> Figure:
    """Plot the accuracy after each task, the mean over runs, with a band of one standard deviation."""
    figure, axes = _figure()
    selectors, sizes = common_selectors_and_sizes(runs)
    selector = min(run.default_selector for run in runs)
    tasks = range(1, runs[0].num_tasks + 1)
    shown: dict[str, tuple[list[Metrics], str, str]] = {
        TASK_KNOWN: ([run.task_il for run in runs], COLOURS["upper_bound"], "s-")
    }
    for each, style in ((1, "o-"), (size, "o--")):
        if selector in selectors and each in sizes:
            metrics = [run.class_il[selector][each] for run in runs]
            shown[f"cps {selector}, {describe_group_size(each)}"] = (metrics, COLOURS["ours"], style)
    for label, closed in _closed_forms_of_all(runs, [1]).items():
        shown[f"{label}, one image"] = ([by_size[1] for by_size in closed], COLOURS["closed_form"], "D-")
    for label, (metrics, colour, style) in shown.items():
        curves = np.array([history(each.accuracy) for each in metrics])
        _mean_line(axes, tasks, curves, style, colour, label)
    paper = PUBLISHED.get(runs[0].recipe)
    published = {} if paper is None else {describe_group_size(size): paper.history.get(size, [])}
    if paper is not None:
        published["task known"] = paper.task_il
    for label, curve in published.items():
        if len(curve) == len(tasks):
            axes.plot(tasks, curve, ":", color=COLOURS["grey"], label=f"paper, {label} (top-5)")
    _number_ticks(axes, tasks)
    _decorate(axes, "tasks learned", "mean accuracy on the tasks so far (%)")
    return figure


def plot_group_sizes(runs: Sequence[Results]) -> Figure:
    """Plot the accuracy by group size for each selector, the mean over runs, with a band of one standard deviation."""
    figure, axes = _figure()
    selectors, sizes = common_selectors_and_sizes(runs)
    others = cycle(product(("o--", "o:", "o-."), SELECTOR_COLOURS.values()))
    for selector in selectors:
        curves = np.array([[run.class_il[selector][size].ACC for size in sizes] for run in runs])
        style, colour = ("o-", SELECTOR_COLOURS[selector]) if selector in SELECTOR_COLOURS else next(others)
        _mean_line(axes, range(len(sizes)), curves, style, COLOURS[colour], selector)
    for label, closed in _closed_forms_of_all(runs, sizes).items():
        curves = np.array([[by_size[size].ACC for size in sizes] for by_size in closed])
        _mean_line(axes, range(len(sizes)), curves, "D-", COLOURS["closed_form"], label)
    upper_bound = float(np.mean([run.task_il.ACC for run in runs]))
    axes.axhline(upper_bound, color=COLOURS["upper_bound"], linestyle="--", label=TASK_KNOWN)
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    _decorate(axes, "group size (images known to share a task)", "accuracy after the last task (%)")
    return figure


def plot_layer_sharing(results: Results) -> Figure:
    """Plot the union and intersection of all subnetworks in each layer, and how many tasks share a weight."""
    layers, sharing = results.layers, results.sharing
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    places = np.arange(len(layers))
    left.bar(places - 0.2, [layer.union for layer in layers], 0.4, color=COLOURS["ours"], label="any task (union)")
    left.bar(
        places + 0.2, [layer.intersection for layer in layers], 0.4,
        color=COLOURS["other"], label="every task (intersection)",
    )  # fmt: skip
    left.set_xticks(places, [layer.name for layer in layers], rotation=45, ha="right", fontsize=7)
    _decorate(left, "", "weights used (%)")
    _put_legend_above(left)
    right.bar(range(len(sharing)), sharing, color=COLOURS["ours"])
    _number_ticks(right, range(len(sharing)), most=12)
    right.set_xlabel("number of tasks that use a weight (0: free)")
    right.set_ylabel("share of all weights (%)")
    draw_light_grid(right)
    return figure


def plot_taken_weights(results: Results) -> Figure:
    """Plot the weights that each subnetwork uses, and those that all tasks so far use together."""
    figure, axes = _figure()
    tasks = range(1, len(results.subnetworks) + 1)
    density = [subnetwork.density for subnetwork in results.subnetworks]
    axes.bar(tasks, density, color=COLOURS["ours"], label="used by this task")
    taken = [subnetwork.taken for subnetwork in results.subnetworks]
    axes.plot(tasks, taken, "o-", color=COLOURS["low"], label="used by all tasks so far")
    _number_ticks(axes, tasks)
    _decorate(axes, "task", "share of all weights (%)")
    return figure


def _closed_forms_of_all(runs: Sequence[Results], sizes: Sequence[int]) -> dict[str, list[dict[int, Metrics]]]:
    """Return the closed forms that all runs have, with all of these group sizes."""
    return {
        label: found
        for label, found in closed_forms(runs).items()
        if len(found) == len(runs) and all(size in by_size for by_size in found for size in sizes)
    }


def draw_light_grid(axes: Axes) -> None:
    """Draw thin horizontal lines, and remove the upper and right border."""
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _shown_sizes(results: Results) -> list[int]:
    """Return the smallest group size and a large one, or only one if they are equal."""
    return list(dict.fromkeys((results.group_sizes[0], large_group_size(results.group_sizes))))


def _our_label(results: Results, size: int) -> str:
    return f"cps {results.default_selector}, {describe_group_size(size)}"


def _heatmaps(matrices: Mapping[str, Matrix]) -> Figure:
    """Draw matrices (after, on) side by side."""
    tasks = len(next(iter(matrices.values())))
    side = max(3.2, 0.36 * tasks + 1.2)
    figure = Figure(figsize=(len(matrices) * side + 1.2, side + 0.3), layout="constrained")
    every = figure.subplots(1, len(matrices), squeeze=False)[0]
    for axes, (title, values) in zip(every, matrices.items(), strict=True):
        image = axes.imshow(values, vmin=0, vmax=100, cmap="viridis")
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("tested on task")
        axes.set_ylabel("after learning task")
        axes.set_xticks(range(tasks), range(1, tasks + 1), fontsize=8)
        axes.set_yticks(range(tasks), range(1, tasks + 1), fontsize=8)
        for after in range(tasks):
            for on in range(after + 1):
                colour = "black" if values[after, on] > 60 else "white"
                axes.text(on, after, f"{values[after, on]:.0f}", ha="center", va="center", color=colour, fontsize=7)
        figure.colorbar(image, ax=axes, shrink=0.8)
    return figure


def _mean_line(axes: Axes, places: Sequence[int], curves: Matrix, style: str, colour: str, label: str) -> None:
    """Draw the mean of some curves, and a band of one standard deviation if there are several."""
    mean = curves.mean(axis=0)
    _line(axes, places, mean, style, colour, label)
    if len(curves) > 1:
        deviation = curves.std(axis=0, ddof=1)
        axes.fill_between(places, mean - deviation, mean + deviation, color=colour, alpha=0.15, linewidth=0)


def _line(
    axes: Axes, places: Sequence[int], values: Sequence[float] | Matrix, style: str, colour: str, label: str
) -> None:
    """Draw a curve. The markers of dashed curves are hollow, so that markers below them stay visible."""
    axes.plot(places, values, style, color=colour, markerfacecolor="white" if "--" in style else colour, label=label)


def _figure(width: float = 6.4) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, 3.8), layout="constrained")
    return figure, figure.subplots()


def _decorate(axes: Axes, x: str, y: str) -> None:
    """Add the labels of the axes, a scale from 0 to 100, a grid and a legend."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_ylim(0, 104)
    draw_light_grid(axes)
    axes.legend(fontsize=8, frameon=False, loc="best")


def _put_legend_above(axes: Axes) -> None:
    """Move the legend above the plot, where it covers no bars."""
    axes.legend(fontsize=8, frameon=False, loc="lower left", ncols=3, bbox_to_anchor=(0, 1))


def _number_ticks(axes: Axes, numbers: range, most: int = 20) -> None:
    """Label the x-axis with all numbers, or with every second, fifth, ... one if there are more than `most`."""
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, len(numbers)) if len(numbers) <= most * step)
    axes.set_xticks([number for number in numbers if number % step == 0])
