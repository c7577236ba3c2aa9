"""Tables over several runs: mean and standard deviation over runs that differ only in class order or seed."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from cps.evaluation.metrics import Matrix, Metrics, history
from cps.experiments.published import PUBLISHED
from cps.experiments.results import Results, upgrade_settings_text

Table = tuple[list[str], list[list[str]]]  # head and rows, as text
BOUNDS = {"finetuning": "finetuning", "joint": "joint training"}
METRICS_SIZES = (1, 20, 60)  # group sizes in the table of metrics


def group_runs(runs: Sequence[Results]) -> dict[str, list[Results]]:
    """Return the runs of each recipe with the same training; evaluations with mirror images are groups of their own.

    A group is named by its recipe, and by what distinguishes it from other runs of that recipe.
    """
    same_recipe = {run.recipe: [other for other in runs if other.recipe == run.recipe] for run in runs}
    differing = {recipe: _differing_settings(same) for recipe, same in same_recipe.items()}
    kinds = {recipe: {_describe(run, differing[recipe]) for run in same} for recipe, same in same_recipe.items()}

    def name_of(run: Results) -> str:
        is_only_kind = len(kinds[run.recipe]) == 1
        return run.recipe if is_only_kind else f"{run.recipe} ({_describe(run, differing[run.recipe])})"

    groups: dict[str, list[Results]] = {}
    for run in runs:
        groups.setdefault(name_of(run), []).append(run)
    for run in runs:
        if run.flips is not None:
            groups.setdefault(f"{name_of(run)}, flips", []).append(run.with_evaluation(run.flips))
    return groups


def describe_training(run: Results) -> str:
    """Return the epochs, pruning rounds and precision of a run as text."""
    if run.epochs is None:
        return "epochs not recorded"
    train, retrain = run.epochs
    return f"{train} + {run.rounds} x {retrain} epochs, {run.precision}"


def describe_group_size(size: int) -> str:
    """Return "one image", or "groups of" the size."""
    return "one image" if size == 1 else f"groups of {size}"


def large_group_size(sizes: Sequence[int]) -> int:
    """Return the group size to show beside the smallest one: 20, or the largest if there is no 20."""
    return 20 if 20 in sizes else sizes[-1]


def format_mean(values: Sequence[float]) -> str:
    """Return the mean, with the standard deviation if there are several values."""
    mean = statistics.fmean(values)
    return f"{mean:.1f} ± {statistics.stdev(values):.1f}" if len(values) > 1 else f"{mean:.1f}"


def accuracy_table(runs: Sequence[Results]) -> Table:
    """Return the table of accuracy by group size, for each recipe and selector, and of the bounds."""
    sizes = sorted({size for run in runs for by_size in run.class_il.values() for size in by_size})
    rows = []
    for name, same in group_runs(runs).items():
        known = format_mean([run.task_il.ACC for run in same])
        rows.append([name, "task known", str(len(same)), *[known] * len(sizes)])
        for selector in dict.fromkeys(selector for run in same for selector in run.class_il):
            found = [run.class_il[selector] for run in same if selector in run.class_il]
            cells = [_cell([by_size[size].ACC for by_size in found if size in by_size], len(found)) for size in sizes]
            rows.append([name, selector, str(len(found)), *cells])
        for label, closed in closed_forms(same).items():
            cells = [_cell([each[size].ACC for each in closed if size in each], len(closed)) for size in sizes]
            rows.append([name, label, str(len(closed)), *cells])
        for bound, label in BOUNDS.items():
            metrics = [getattr(run.bounds, bound) for run in same]
            accuracies = [each.ACC for each in metrics if each is not None]
            if accuracies:
                rows.append([name, label, str(len(accuracies)), format_mean(accuracies), *[""] * (len(sizes) - 1)])
    return ["recipe", "selector", "runs", *map(str, sizes)], rows


def metrics_table(runs: Sequence[Results]) -> Table:
    """Return the table of ACC, AIA, BWT and selection accuracy at a few group sizes, beside the paper's numbers.

    These are means over tasks, except for the column "AIA over images": the paper's AIA weighs all images equally.
    """
    rows = []
    for name, same in group_runs(runs).items():
        selectors, sizes = common_selectors_and_sizes(same)
        defaults = sorted({run.default_selector for run in same} & set(selectors))
        measured = {selector: [run.class_il[selector] for run in same] for selector in defaults}
        measured |= {label: each for label, each in closed_forms(same).items() if len(each) == len(same)}
        shown = [(label, size) for label in measured for size in METRICS_SIZES if size in sizes]
        for selector, size in [(label, size) for label, size in shown if all(size in each for each in measured[label])]:
            metrics = [by_size[size] for by_size in measured[selector]]
            cells = [
                format_mean([each.ACC for each in metrics]),
                format_mean([each.AIA for each in metrics]),
                _incremental_accuracy_over_images(same, metrics),
                format_mean([each.BWT for each in metrics]),
                format_mean([float(np.nanmean(each.selection[-1])) for each in metrics if each.selection is not None]),
                _top5(metrics),
            ]
            paper = _published(same[0].recipe, size) if selector in defaults else ""
            rows.append([name, selector, str(size), *cells, paper])
    head = ["recipe", "selector", "group size", "ACC", "AIA", "AIA over images", "BWT", "selection", "top-5", "paper"]
    return head, rows


def task_table(runs: Sequence[Results], size: int) -> Table:
    """Return the table of accuracy on each task after the last one: with the task known, and for each selector."""
    columns: dict[str, list[str]] = {}
    for name, same in group_runs([replace(run, flips=None) for run in runs]).items():
        metrics = {"task known": [run.task_il for run in same]}
        selectors, sizes = common_selectors_and_sizes(same)
        for selector in selectors if size in sizes else []:
            metrics[f"{selector}, {describe_group_size(size)}"] = [run.class_il[selector][size] for run in same]
        for label, closed in closed_forms(same).items():
            if all(size in by_size for by_size in closed):
                metrics[f"{label}, {describe_group_size(size)}"] = [by_size[size] for by_size in closed]
        for label, each in metrics.items():
            by_task = zip(*(entry.accuracy[-1].tolist() for entry in each), strict=True)
            columns[f"{name}, {label}"] = [format_mean(values) for values in by_task]
    tasks = max(len(cells) for cells in columns.values())
    rows = [
        [str(task + 1), *(cells[task] if task < len(cells) else "" for cells in columns.values())]
        for task in range(tasks)
    ]
    return ["task", *columns], rows


def closed_forms(runs: Sequence[Results]) -> dict[str, list[dict[int, Metrics]]]:
    """Return the metrics by group size of the closed forms of some runs, by the name of space and classifier."""
    found: dict[str, list[dict[int, Metrics]]] = {}
    for run in runs:
        if run.bounds.closed_form is not None:
            found.setdefault(run.bounds.closed_form.label, []).append(run.bounds.closed_form.class_il)
    return found


def accuracy_over_images(run: Results, accuracy: Matrix) -> list[float]:
    """Return the accuracy over all images of the classes so far, after each task: tasks weighed by their classes."""
    return history(accuracy, run.classes_per_task)


def common_selectors_and_sizes(runs: Sequence[Results]) -> tuple[list[str], list[int]]:
    """Return the selectors and the group sizes that all runs have."""
    selectors = [name for name in runs[0].class_il if all(name in run.class_il for run in runs)]
    measured = [by_size for run in runs for name, by_size in run.class_il.items() if name in selectors]
    sizes = measured[0] if measured else {}
    return selectors, [size for size in sizes if all(size in by_size for by_size in measured)]


def _differing_settings(runs: Sequence[Results]) -> dict[str, set[str]]:
    """Return the settings in which runs differ, with all their values. Schedules follow the epochs, so they are out."""
    settings = [_settings(run) for run in runs if run.settings is not None]
    if len(settings) < len(runs):
        return {}
    names = dict.fromkeys(name for each in settings for name in each if not name.endswith("schedule"))
    values = {name: {each[name] for each in settings if name in each} for name in names}
    return {name: found for name, found in values.items() if len(found) > 1}


def _describe(run: Results, differing: Mapping[str, set[str]]) -> str:
    """Return the number of tasks, the training, and the settings that differ from other runs."""
    settings = _settings(run)
    parts = [f"{run.num_tasks} tasks", describe_training(run)]
    parts += [f"{name} {_distinct(settings[name], values)}" for name, values in differing.items() if name in settings]
    return ", ".join(parts)


def _settings(run: Results) -> dict[str, str]:
    return upgrade_settings_text(run.settings or {})


def _distinct(value: str, values: set[str]) -> str:
    """Return the parts of a setting that not all values have, or the whole value."""
    common = set.intersection(*({*other.split(", ")} for other in values))
    return ", ".join(part for part in value.split(", ") if part not in common) or value


def _incremental_accuracy_over_images(runs: Sequence[Results], metrics: Sequence[Metrics]) -> str:
    """Return the AIA over images, or nothing if all tasks have equally many classes."""
    if len(set(runs[0].classes_per_task)) == 1:
        return ""
    curves = [accuracy_over_images(run, each.accuracy) for run, each in zip(runs, metrics, strict=True)]
    return format_mean([statistics.fmean(curve) for curve in curves])


def _top5(metrics: Sequence[Metrics]) -> str:
    values = [each.top5 for each in metrics if each.top5 is not None]
    return format_mean(values) if len(values) == len(metrics) else ""


def _published(recipe: str, size: int) -> str:
    """Return the paper's number for a recipe and a group size, if it has one."""
    paper = PUBLISHED.get(recipe)
    if paper is None:
        return ""
    if paper.BWT is not None and size == 60:
        return f"AIA over images {paper.AIA} ± {paper.AIA_std}, BWT {paper.BWT}"
    if size in paper.history:
        return f"{paper.history[size][-1]:.1f} ({paper.measure})"
    return ""


def _cell(values: Sequence[float], runs: int) -> str:
    """Return mean and standard deviation, and the number of runs if it is smaller than `runs`."""
    count = f" ({len(values)} of {runs} runs)" if len(values) < runs else ""
    return f"{format_mean(values)}{count}" if values else ""
