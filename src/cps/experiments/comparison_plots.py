"""Plots of a comparison of methods: curves over tasks and over group sizes, and accuracy against what is kept."""

from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from cps.evaluation.metrics import history
from cps.experiments.aggregate import describe_group_size
from cps.experiments.comparison import Comparison
from cps.experiments.comparison_tables import MEBIBYTE, Row, rows_of, shown_group_size
from cps.experiments.contestants import CLOSED_FORM
from cps.experiments.plots import COLOURS, draw_light_grid

FIXED = {"cps": "ours", CLOSED_FORM: "closed_form", "finetuning": "low", "joint": "grey"}  # the colours of some methods
MARKERS, LINES = "osv^<>Dph*PX", ("-", "--", ":", "-.")
ROW_HEIGHT = 0.17  # inches of a line of the legend


class Style:
    """The colour, line and marker of each row: warm colours for methods that keep images, cool ones for others."""

    def __init__(self, rows: Sequence[Row]):
        others = list(dict.fromkeys(row.method for row in rows if row.method not in FIXED))
        replay = [name for name in others if _keeps_images(rows, name)]
        rest = [name for name in others if name not in replay]
        self.colours = {name: COLOURS[colour] for name, colour in FIXED.items()}
        for names, colours, (first, last) in ((replay, "autumn", (0.0, 0.75)), (rest, "summer", (0.0, 0.7))):
            places = np.linspace(first, last, max(len(names), 1))
            self.colours |= {
                name: to_hex(colormaps[colours](place)) for name, place in zip(names, places, strict=False)
            }
        markers = dict(zip(self.colours, cycle(MARKERS), strict=False))
        self.lines = {row.label: LINES[_number_of_way(row) % len(LINES)] for row in rows}
        self.markers = {row.label: markers[row.method] for row in rows}

    def of(self, row: Row) -> dict[str, Any]:
        """Return the options of a row for `Axes.plot`."""
        return {
            "color": self.colours[row.method],
            "linestyle": self.lines[row.label],
            "marker": self.markers[row.label],
        }


def plot_histories(comparison: Comparison, size: int) -> Figure:
    """Plot the mean accuracy on the tasks so far, after each of them, for a group size: means over class orders."""
    rows = rows_of(comparison)
    figure, axes = _figure(rows)
    style = Style(rows)
    tasks = 1
    for row in _best_first(rows, lambda row: _final(row, size)):
        metrics = [each.metrics(size, row.way) for each in row.results]
        curves = [history(each.accuracy) for each in metrics if each is not None]
        if row.results[0].is_joint:
            axes.axhline(float(np.mean(curves)), color=COLOURS["grey"], linestyle=":", label=row.label)
        else:
            curve = np.mean(curves, axis=0)
            tasks = max(tasks, len(curve))
            axes.plot(range(1, len(curve) + 1), curve, label=row.label, markersize=3.5, linewidth=1.2, **style.of(row))
    axes.set_xlabel("tasks learned")
    axes.set_ylabel(f"accuracy on the tasks so far (%), {describe_group_size(size)}")
    axes.set_xticks(range(1, tasks + 1))
    _decorate(axes)
    return figure


def plot_group_sizes(comparison: Comparison) -> Figure:
    """Plot the accuracy after the last task by group size, for every method: means over class orders."""
    rows, sizes = rows_of(comparison), comparison.group_sizes
    figure, axes = _figure(rows)
    style = Style(rows)
    for row in _best_first(rows, lambda row: _final(row, sizes[0])):
        known = [size for size in sizes if not np.isnan(_final(row, size))]
        curve = [_final(row, size) for size in known]
        places = [sizes.index(size) for size in known]
        axes.plot(places, curve, label=row.label, markersize=3.5, linewidth=1.2, **style.of(row))
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set_xlabel("group size (images known to share a task)")
    axes.set_ylabel("accuracy after the last task (%)")
    _decorate(axes)
    return figure


def plot_bytes(comparison: Comparison, size: int) -> Figure:
    """Plot the accuracy after the last task, for a group size, against the bytes that a method keeps."""
    rows = rows_of(comparison)
    figure, axes = _figure(rows)
    style = Style(rows)
    for row in _best_first(rows, lambda row: _final(row, size)):
        options = {**style.of(row), "linestyle": "none"}
        if _number_of_way(row):
            options["markerfacecolor"] = "white"
        axes.plot([row.kept / MEBIBYTE], [_final(row, size)], label=row.label, markersize=7, **options)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("kept between tasks (MiB)")
    axes.set_ylabel(f"accuracy after the last task (%), {describe_group_size(size)}")
    _decorate(axes)
    return figure


def plots_of(comparison: Comparison) -> Iterable[tuple[Figure, str]]:
    """Return all plots of a comparison, each with its caption."""
    size = shown_group_size(comparison)
    colours = "Orange: methods that keep images; green: methods that keep none; blue: cps; purple: closed form."
    yield (
        plot_histories(comparison, 1),
        f"Accuracy on single images after each task. A method that forgets loses accuracy. {colours}",
    )
    if size != 1:
        yield plot_histories(comparison, size), f"The same for {describe_group_size(size)} that share a task."
        yield (
            plot_group_sizes(comparison),
            "Accuracy by group size. The images of a group are known to share a task; group size 1 assumes nothing.",
        )
    yield (
        plot_bytes(comparison, 1),
        "Accuracy on single images against everything that a method keeps between tasks: weights, images, statistics.",
    )


def _keeps_images(rows: Sequence[Row], method: str) -> bool:
    return any(row.results[0].assumes.get("replay", False) for row in rows if row.method == method)


def _number_of_way(row: Row) -> int:
    return list(row.results[0].ways).index(row.way)


def _final(row: Row, size: int) -> float:
    """Return the mean accuracy after the last task for a group size; NaN if it was not measured."""
    found = [each.metrics(size, row.way) for each in row.results]
    return float(np.mean([np.nan if each is None else each.ACC for each in found]))


def _best_first(rows: Sequence[Row], value: Callable[[Row], float]) -> list[Row]:
    return sorted(rows, key=lambda row: -np.nan_to_num(value(row), nan=-1.0))


def _figure(rows: Sequence[Row]) -> tuple[Figure, Axes]:
    """Return a figure that is high enough for a legend of all rows."""
    figure = Figure(figsize=(9.2, max(4.2, ROW_HEIGHT * len(rows) + 0.5)), layout="constrained")
    return figure, figure.subplots()


def _decorate(axes: Axes) -> None:
    """Add a scale from 0 to 100, a grid, and a legend beside the plot."""
    axes.set_ylim(0, 104)
    draw_light_grid(axes)
    axes.legend(fontsize=7.5, frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5), labelspacing=0.35)
