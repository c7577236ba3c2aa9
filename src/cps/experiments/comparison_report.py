"""The part of a report that is about a comparison of methods."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from cps.experiments.aggregate import Table, describe_group_size
from cps.experiments.comparison import Comparison
from cps.experiments.comparison_tables import Row, accuracy_table, assumption_table, cost_table, rows_of
from cps.experiments.page import html_figures, html_table
from cps.experiments.published_rivals import PublishedNumber, published_numbers
from cps.runtime.text import format_count, join_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTE = (
    "Mean and standard deviation over class orders. One image assumes nothing; the images of a group share a task. "
    "With the task known, only its classes compete. AIA is the mean accuracy on single images after each task, and BWT "
    "what was lost since a task was learned."
)


def comparison_section(comparison: Comparison) -> dict[str, Any]:
    """Return what the template shows about a comparison."""
    published = published_table(comparison)
    failures = [[each.method, str(each.order), each.error] for each in comparison.failures]
    return {
        "recipe": comparison.recipe,
        "description": _describe(comparison),
        "accuracy": html_table(accuracy_table(comparison)),
        "note": NOTE,
        "cost": html_table(cost_table(comparison)),
        "figures": html_figures(lambda: _plots(comparison)),
        "assumptions": html_table(assumption_table(comparison)),
        "published": html_table(published) if published[1] else None,
        "failures": html_table((["method", "order", "error"], failures)) if failures else None,
        "facts": _facts(comparison),
    }


def _plots(comparison: Comparison) -> Iterable[tuple["Figure", str]]:
    from cps.experiments.comparison_plots import plots_of

    return plots_of(comparison)


def published_table(comparison: Comparison) -> Table:
    """Return what was published for the same data in the same tasks, beside what the comparison measured."""
    sizes = comparison.results[0].classes_per_task if comparison.results else [0]
    here = {row.method: row for row in reversed(rows_of(comparison))}
    head = [
        "method",
        "AIA",
        "last",
        "task known",
        "images",
        "measure",
        "protocol",
        "source",
        "read",
        "AIA here",
        "last here",
    ]
    rows = [
        [
            each.name,
            *("" if value is None else f"{value:g}" for value in (each.AIA, each.last, each.known)),
            "one" if each.group_size == 1 else describe_group_size(each.group_size),
            each.measure,
            each.protocol,
            each.source,
            each.reading,
            *_measured_here(each, here.get(each.method)),
        ]
        for each in published_numbers(comparison.recipe, sizes)
    ]
    return head, rows


def _measured_here(published: PublishedNumber, row: Row | None) -> tuple[str, str]:
    """Return the AIA over images and the last accuracy of a method here, at the published group size."""
    if row is None or published.measure != "top-1":
        return "", ""
    if published.group_size != 1:
        found = [each.metrics(published.group_size, row.way) for each in row.results]
        accuracies = [each.ACC for each in found if each is not None]
        return "", _mean(accuracies) if len(accuracies) == len(found) else ""
    return _mean(row.aia_images), _mean(row.one)


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.1f}" if values else ""


def _describe(comparison: Comparison) -> str:
    sizes = list(comparison.results[0].classes_per_task) if comparison.results else [0]
    tasks = f"{len(sizes)} tasks of {sizes[0]}" if len(set(sizes)) == 1 else f"tasks of {join_names(sizes)}"
    budget = f"{comparison.passes} passes over the images of each task" if comparison.passes else "as published"
    memory = comparison.memory or "as published"
    return (
        f"{tasks} classes, {format_count(len(comparison.methods), 'method')}, "
        f"{format_count(len(comparison.orders), 'class order')} ({join_names(comparison.orders)}), training: {budget}, "
        f"memory: {memory}"
    )


def _facts(comparison: Comparison) -> dict[str, str]:
    devices = dict.fromkeys(each.device for each in comparison.results)
    versions = dict.fromkeys(
        ", ".join(f"{name} {version}" for name, version in each.versions.items()) for each in comparison.results
    )
    return {
        "device": "; ".join(devices),
        "versions": "; ".join(versions),
        "seeds": join_names(list(dict.fromkeys(each.seed for each in comparison.results))),
        "protocol": "Measured after the last epoch of each task. Nothing was chosen on test images. Groups are drawn "
        "at random within a task; if the task of a group is mistaken, all of its images count as wrong. A head for all "
        "classes selects the task of a group by its part of the softmax (SoftmaxMass), and other methods by the "
        "selector that the table names. Methods with one head share the statistics of batch norm among tasks; "
        "subnetworks and columns have their own.",
    }
