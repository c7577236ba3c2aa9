"""The report: one self-contained HTML page with tables and plots of one or more runs."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cps.evaluation.confusion import Confusion
from cps.experiments.aggregate import (
    BOUNDS,
    Table,
    accuracy_table,
    closed_forms,
    describe_group_size,
    describe_training,
    group_runs,
    large_group_size,
    metrics_table,
    task_table,
)
from cps.experiments.comparison import Comparison, merge_comparisons
from cps.experiments.comparison_report import comparison_section
from cps.experiments.comparison_tables import to_csv, to_latex
from cps.experiments.page import HtmlFigure, HtmlTable, html_figures, html_table, write_page
from cps.experiments.results import Results
from cps.storage.atomic import write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_PAIRS = 10  # of classes that are confused


class Card(NamedTuple):
    """One of the large numbers at the top of a run; `kind` is its CSS class."""

    kind: str
    value: str
    text: str


def write_report(path: Path, runs: Sequence[Results], comparisons: Sequence[Comparison] = ()) -> None:
    """Write the page about runs and comparisons of methods, one or more of them."""
    merged = merge_comparisons(comparisons)
    write_page(
        path,
        "report.html.j2",
        title=", ".join(dict.fromkeys(each.recipe for each in (*merged, *runs))),
        comparisons=[comparison_section(each) for each in merged],
        overview=_overview(runs) if len(runs) > 1 else None,
        runs=[_section(run) for run in runs],
    )


def write_comparison(folder: Path, comparison: Comparison) -> None:
    """Write a comparison of methods to table.csv, table.tex and report.html."""
    write_text(folder / "table.csv", to_csv(comparison))
    write_text(folder / "table.tex", to_latex(comparison))
    write_report(folder / "report.html", [], [comparison])


def group_size_table(run: Results) -> Table:
    """Return the table of accuracy by group size of one run, as text."""
    sizes = run.group_sizes
    rows = []
    for evaluation, suffix in ((run, ""), (run.flips, ", flips")):
        if evaluation is not None:
            rows.append([f"task known{suffix}", *[_percent(evaluation.task_il.ACC)] * len(sizes)])
            for selector, by_size in evaluation.class_il.items():
                cells = [_percent(by_size[size].ACC) if size in by_size else "" for size in sizes]
                rows.append([f"cps {selector}{suffix}", *cells])
    for label, (by_size,) in closed_forms([run]).items():
        rows.append([label, *(_percent(by_size[size].ACC) if size in by_size else "" for size in sizes)])
    for bound, label in BOUNDS.items():
        metrics = getattr(run.bounds, bound)
        if metrics is not None:
            rows.append([label, _percent(metrics.ACC), *[""] * (len(sizes) - 1)])
    return ["accuracy (%) by group size", *map(str, sizes)], rows


def _overview(runs: Sequence[Results]) -> dict[str, Any]:
    """Return what the template shows about all runs together."""
    return {
        "runs": len(runs),
        "accuracy": html_table(accuracy_table(runs)),
        "metrics": html_table(metrics_table(runs)),
        "tasks": html_table(task_table(runs, 20)),
        "groups": [_group(name, same) for name, same in group_runs(runs).items()],
    }


def _group(name: str, runs: Sequence[Results]) -> dict[str, Any]:
    return {
        "name": name,
        "runs": ", ".join(f"order {run.order} seed {run.seed}" for run in runs),
        "figures": html_figures(lambda: _plots_of_group(runs)),
    }


def _plots_of_group(runs: Sequence[Results]) -> Iterator[tuple["Figure", str]]:
    from cps.experiments import plots

    band = "; the band is one standard deviation" if len(runs) > 1 else ""
    yield plots.plot_mean_history(runs, large_group_size(runs[0].group_sizes)), f"Accuracy after each task{band}."
    yield plots.plot_group_sizes(runs), f"Accuracy by group size{band}."


def _section(run: Results) -> dict[str, Any]:
    """Return what the template shows about one run."""
    tasks = run.classes_per_task
    description = [
        f"{len(tasks)} tasks",
        f"{sum(tasks)} classes ({_describe_sizes(tasks)})",
        f"order {run.order}",
        f"seed {run.seed}",
        describe_training(run),
        "one run",
    ]
    table = _subnetwork_table(run)
    return {
        "name": run.recipe,
        "description": ", ".join(description),
        "cards": _cards(run),
        "accuracy": html_table(group_size_table(run)),
        "figures": html_figures(lambda: _plots(run)),
        "confusion": None if run.confusion is None else _confusion(run.confusion),
        "subnetworks": None if table is None else html_table(table),
        "facts": _facts(run),
    }


def _plots(run: Results) -> Iterator[tuple["Figure", str]]:
    from cps.experiments import plots

    smallest, large = run.group_sizes[0], large_group_size(run.group_sizes)
    yield (
        plots.plot_accuracy_history(run),
        "Accuracy after each task. A method that forgets loses accuracy. The gap between the blue lines and the green "
        "line is the cost of not knowing the task. The closed form (purple, where it was measured) computes a "
        "classifier from sums over fixed features and trains nothing.",
    )
    yield (
        plots.plot_group_sizes([run]),
        "Accuracy by group size after the last task. The images of a group are known to share a task; group size 1 "
        "assumes nothing.",
    )
    yield (
        plots.plot_matrices(run, smallest),
        f"Accuracy of the predicted class and of the selected task for {describe_group_size(smallest)}.",
    )
    if large != smallest:
        yield plots.plot_matrices(run, large), f"The same for groups of {large}."
    yield (
        plots.plot_selection(run, smallest),
        f"How often each selector finds the right task for {describe_group_size(smallest)}.",
    )
    if large != smallest:
        yield plots.plot_selection(run, large), f"The same for groups of {large}."
    yield plots.plot_final_accuracy(run), "Accuracy on each task after the last one."
    yield (
        plots.plot_forgetting(run),
        "Accuracy lost so far on earlier tasks. With the task known, nothing is forgotten. Without it, accuracy drops "
        "because there are more tasks to choose from.",
    )
    if run.layers:
        yield (
            plots.plot_layer_sharing(run),
            "Weights of each layer that any or every task uses, and how many tasks share a weight.",
        )
    if run.subnetworks:
        yield plots.plot_taken_weights(run), "Weights used by each task, and by all tasks so far."


def _confusion(confusion: Confusion) -> dict[str, Any]:
    """Return what the template shows about the accuracy of each class."""
    classes = sorted((each for each in confusion.classes if each.images), key=lambda each: each.right / each.images)
    accuracy = [[name, _percent(100 * right / images), str(images)] for name, right, images in classes]
    pairs = [[one, other, str(images)] for one, other, images in confusion.pairs[:MOST_PAIRS]]
    caption = "Single test images after the last task: rows are true classes, columns the predicted ones."
    return {
        "figures": [HtmlFigure(confusion.picture(), caption)],
        "pairs": HtmlTable(["most often confused", "with", "images"], pairs, [True, True, False]),
        "accuracy": HtmlTable(["class", "right (%)", "images"], accuracy, [True, False, False]),
    }


def _subnetwork_table(run: Results) -> Table | None:
    """Return the table of the cost of each subnetwork beside the dense network; None if a file has no costs."""
    if run.dense is None or run.milliseconds_per_image is None:
        return None
    milliseconds = run.milliseconds_per_image
    rows = [["dense network", "100.0", "", *_cost(run.dense.parameters, run.dense.operations, milliseconds.dense)]]
    for subnetwork, time in zip(run.subnetworks, milliseconds.tasks, strict=True):
        cost = _cost(subnetwork.parameters or 0, subnetwork.operations or 0, time)
        rows.append([f"task {subnetwork.task + 1}", _percent(subnetwork.density), _percent(subnetwork.taken), *cost])
    head = ["", "weights used (%)", "taken so far (%)", "parameters", "million operations", "ms per image"]
    return head, rows


def _cost(parameters: int, operations: int, milliseconds: float) -> list[str]:
    return [f"{parameters:,}", f"{operations / 1e6:.2f}", f"{milliseconds:.2f}"]


def _cards(run: Results) -> list[Card]:
    sizes = dict.fromkeys((run.group_sizes[0], large_group_size(run.group_sizes)))
    cards = [
        Card("", f"{_percent(run.default_metrics[size].ACC)}%", f"class-IL accuracy, {describe_group_size(size)}")
        for size in sizes
    ]
    cards += [
        Card("upper_bound", f"{_percent(run.task_il.ACC)}%", "task-IL accuracy (task known)"),
        Card("upper_bound", f"{_percent(run.task_il.BWT)}%", "forgotten (task-IL BWT)"),
    ]
    for label, (by_size,) in closed_forms([run]).items():
        size = run.group_sizes[0]
        if size in by_size:
            text = f"{label}, which trains nothing, {describe_group_size(size)}"
            cards.append(Card("closed_form", f"{_percent(by_size[size].ACC)}%", text))
    if run.bounds.finetuning is not None:
        cards.append(Card("low", f"{_percent(run.bounds.finetuning.ACC)}%", "finetuning, which forgets"))
    return cards


def _facts(run: Results) -> dict[str, str]:
    is_exception = "Cascade" in run.class_il and run.recipe.startswith("cifar100")
    exception = ", except the default settings of the cascade (docs/one-image-measured.md)" if is_exception else ""
    return {
        "device": run.device,
        "versions": ", ".join(f"{name} {version}" for name, version in run.versions.items()),
        "seconds": f"learning {run.seconds.learn:.1f}, evaluation {run.seconds.evaluate:.1f}",
        "shared weights": "not recorded" if run.weights is None else f"{run.weights:,}",
        "training": describe_training(run),
        "selector": run.default_selector,
        **_closed_form_fact(run),
        "protocol": f"Measured after the last epoch. Nothing was chosen on test images{exception}. Groups are "
        "drawn at random within a task. If the task of a group is mistaken, all of its images count as wrong. Mirror "
        "images are used only in rows marked 'flips'.",
    }


def _closed_form_fact(run: Results) -> dict[str, str]:
    closed = run.bounds.closed_form
    if closed is None:
        return {}
    kept = sum(size for name, size in closed.kept.items() if name != "weights")
    flips = ", mirror images added" if closed.flips else ""
    return {
        "closed form": f"{closed.classifier} on {closed.space}{flips}; {closed.seconds:.1f} seconds, keeps "
        f"{kept / 2**20:.1f} MiB"
    }


def _percent(value: float) -> str:
    return f"{value:.1f}"


def _describe_sizes(classes_per_task: Sequence[int]) -> str:
    is_equal = len(set(classes_per_task)) == 1
    return f"{classes_per_task[0]} each" if is_equal else " + ".join(map(str, classes_per_task))
