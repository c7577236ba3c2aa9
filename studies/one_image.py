"""Tables and plot of the recipes for single images."""

import statistics
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from cps.evaluation.metrics import Matrix, Metrics
from cps.experiments.aggregate import accuracy_over_images, describe_training, format_mean
from cps.experiments.plots import COLOURS, draw_light_grid
from cps.experiments.results import Results
from studies.published import describe_closed_form, describe_runs, markdown, published_runs

SINGLE_RECIPES = {
    "cifar100-10-single": "10 tasks of 10",
    "cifar100-20-single": "20 tasks of 5",
    "cifar100-5-single": "5 tasks of 20",
    "cifar100-b50-single": "50 classes, then 5 tasks of 10",
}
OTHER_METHODS = {  # the best published results on single images from scratch without old images, last / AIA
    "cifar100-10-single": "65.4 / 75.8 (DCNet)",
    "cifar100-20-single": "59.3 (Sup+CSI)",
    "cifar100-5-single": "65.6 / 75.0 (APR)",
    "cifar100-b50-single": "AIA 71 (FeCAM)",
}
SHARED_GPU = {  # orders whose run shared the GPU with others, so their times are only upper bounds
    "cifar100-20-single": (1993, 2022),
    "cifar100-5-single": (1993, 2022),
    "cifar100-b50-single": (1993, 1605, 2022),
}


def accuracy_table() -> str:
    """Return the table of the accuracy of the recipes for single images."""
    rows = []
    for recipe, runs in _published_runs().items():
        curves = [_cascade_curve(run, 1) for run in runs]
        columns = [
            [curve[-1] for curve in curves],
            [statistics.fmean(curve) for curve in curves],
            [_cascade_curve(run, 20)[-1] for run in runs],
            [accuracy_over_images(run, run.task_il.accuracy)[-1] for run in runs],
        ]
        closed = [_closed_form(runs, size) for size in (1, 20)]
        cells = [*map(format_mean, columns), *closed, str(len(runs)), OTHER_METHODS[recipe]]
        rows.append([SINGLE_RECIPES[recipe], *cells])
    head = ["CIFAR-100 (%)", "one image", "one image, AIA", "groups of 20", "task known"]
    head += ["closed form, one image", "closed form, groups of 20", "orders", "other methods"]
    note = f"Over all images of the classes so far: after the last task, or the mean after each (AIA). {_describe()} "
    note += "Other methods: the best published result from scratch on single images without old images, last / AIA. "
    note += _describe_closed_form()
    return markdown(head, rows, note)


def cost_table() -> str:
    """Return the table of the cost of the recipes for single images, and of how often they find the task."""
    rows = []
    for recipe, runs in _published_runs().items():
        found = [accuracy_over_images(run, _selection(run.class_il["Cascade"][1]))[-1] for run in runs]
        taken = [run.subnetworks[-1].taken for run in runs]
        operations = statistics.fmean(sum(part.operations or 0 for part in run.subnetworks) for run in runs)
        closed = [run.bounds.closed_form for run in runs]
        selection = [accuracy_over_images(run, _selection(each.class_il[1]))[-1]
                     for run, each in zip(runs, closed, strict=True) if each is not None]  # fmt: skip
        found_by_closed_form = format_mean(selection) if len(selection) == len(runs) else ""
        cells = [format_mean(found), found_by_closed_form, format_mean(taken)]
        cells += [describe_training(runs[0]), _minutes(recipe, runs)]
        rows.append([SINGLE_RECIPES[recipe], *cells, f"{operations / 1e9:.0f} G"])
    head = ["CIFAR-100", "task found (%)", "task found, closed form (%)", "weights taken (%)", "training of a task"]
    head += ["minutes for all tasks"]
    run = next(iter(_published_runs().values()))[0]
    assert run.dense is not None
    assert run.weights is not None
    note = (
        f"One ResNet-18 with {run.weights / 1e6:.1f} million weights serves all tasks. Every subnetwork sees an image "
    )
    note += "in four rotations and their mirror images; as many passes through the dense network take "
    note += f"{run.dense.operations / 1e9:.1f} G operations. Minutes are those of runs that had the GPU to themselves; "
    note += f"where there is none, the fastest run that shared it is an upper bound. {_describe()}"
    return markdown([*head, "operations per image"], rows, note)


def gain_table() -> str:
    """Return the table of what the cascade gains over the largest output, on single images and in small groups."""
    rows = []
    for recipe, runs in _published_runs().items():
        cells = [
            format_mean([accuracy_over_images(run, run.class_il[selector][size].accuracy)[-1] for run in runs])
            for size in (1, 5)
            for selector in ("MaxOutput", "Cascade")
        ]
        rows.append([SINGLE_RECIPES[recipe], *cells, *(_closed_form(runs, size) for size in (1, 5))])
    labels = [f"{size}, {name}" for size in ("one image", "groups of 5") for name in ("largest output", "cascade")]
    labels += [f"{size}, closed form" for size in ("one image", "groups of 5")]
    return markdown(
        ["CIFAR-100 (%)", *labels],
        rows,
        f"Over all images after the last task. {_describe()} {_describe_closed_form()}",
    )


def plot_single_images() -> Figure:
    """Plot the accuracy on single images after each task, trained for them and trained as in the paper."""
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    for axes, tasks in zip(panels, (5, 10, 20), strict=True):
        single, paper = published_runs(f"cifar100-{tasks}-single"), published_runs(f"cifar100-{tasks}")
        known = np.mean([accuracy_over_images(run, run.task_il.accuracy) for run in single], axis=0)
        numbers = range(1, tasks + 1)
        axes.plot(numbers, known, "s-", color=COLOURS["upper_bound"], label="task known")
        axes.plot(numbers, _mean_curve(single), "o-", color=COLOURS["ours"], label="one image")
        label = "one image, training of the paper"
        axes.plot(numbers, _mean_curve(paper), "o--", color=COLOURS["other"], label=label)
        closed = [_closed_form_curve(run, 1) for run in single]
        if all(closed):
            label = "one image, closed form, no training"
            axes.plot(numbers, np.mean(closed, axis=0), "D-", color=COLOURS["closed_form"], markersize=4, label=label)
        axes.set_title(f"{tasks} tasks of {100 // tasks}", fontsize=10)
        axes.set_xlabel("tasks learned")
        axes.set_ylim(0, 104)
        draw_light_grid(axes)
    panels[0].set_ylabel("accuracy on all classes so far (%)")
    panels[0].legend(fontsize=8, frameon=False, loc="lower left")
    return figure


def _published_runs() -> dict[str, list[Results]]:
    """Return the published runs of each recipe that has some."""
    return {recipe: runs for recipe in SINGLE_RECIPES if (runs := published_runs(recipe))}


def _cascade_curve(run: Results, size: int) -> list[float]:
    """Return the accuracy of the cascade over all images after each task."""
    return accuracy_over_images(run, run.class_il["Cascade"][size].accuracy)


def _closed_form_curve(run: Results, size: int) -> list[float]:
    """Return the accuracy of the closed form over all images after each task; nothing if it was not measured."""
    closed = run.bounds.closed_form
    return [] if closed is None else accuracy_over_images(run, closed.class_il[size].accuracy)


def _closed_form(runs: Sequence[Results], size: int) -> str:
    """Return the mean accuracy of the closed form over all images after the last task."""
    curves = [_closed_form_curve(run, size) for run in runs]
    return format_mean([curve[-1] for curve in curves]) if all(curves) else ""


def _describe_closed_form() -> str:
    return describe_closed_form(next(iter(_published_runs().values()))[0])


def _mean_curve(runs: Sequence[Results]) -> Matrix:
    return np.mean([_cascade_curve(run, 1) for run in runs], axis=0)


def _selection(metrics: Metrics) -> Matrix:
    assert metrics.selection is not None
    return metrics.selection


def _minutes(recipe: str, runs: Sequence[Results]) -> str:
    """Return the mean time of learning in runs that had the GPU to themselves, or an upper bound."""
    minutes = {run.order: run.seconds.learn / 60 for run in runs}
    exclusive = [minutes[order] for order in minutes if order not in SHARED_GPU.get(recipe, ())]
    return format_mean(exclusive) if exclusive else f"below {min(minutes.values()):.1f}"


def _describe() -> str:
    return describe_runs([run for runs in _published_runs().values() for run in runs])
