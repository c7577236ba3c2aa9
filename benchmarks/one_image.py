"""Tables of docs/one-image.md."""

import statistics
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from benchmarks.records import machine_of, markdown, published_runs, ran_on, read
from cps.experiments.aggregate import mean_and_spread, over_images, training_of
from cps.experiments.plots import COLOURS, light_grid

SINGLE = {
    "cifar100-10-single": "10 tasks of 10",
    "cifar100-20-single": "20 tasks of 5",
    "cifar100-5-single": "5 tasks of 20",
    "cifar100-b50-single": "50 classes, then 5 tasks of 10",
}
ELSEWHERE = {  # the best published on single images from scratch without old images, last / AIA
    "cifar100-10-single": "65.4 / 75.8 (DCNet)",
    "cifar100-20-single": "59.3 (Sup+CSI)",
    "cifar100-5-single": "65.6 / 75.0 (APR)",
    "cifar100-b50-single": "AIA 71 (FeCAM)",
}

SHARED = {  # orders whose run shared the GPU with others, so that its minutes say little
    "cifar100-20-single": (1993, 2022),
    "cifar100-5-single": (1993, 2022),
    "cifar100-b50-single": (1993, 1605, 2022),
}


def single_table() -> str:
    """Return what the recipes for single images reach."""
    head = ["CIFAR-100 (%)", "one image", "one image, AIA", "groups of 20", "task known", "orders"]
    rows = []
    for recipe, runs in _single_runs().items():
        ways = [run["class_il"]["Cascade"] for run in runs]
        ones = [over_images(run, way["1"]["accuracy"]) for run, way in zip(runs, ways, strict=True)]
        grouped = [over_images(run, way["20"]["accuracy"])[-1] for run, way in zip(runs, ways, strict=True)]
        known = [over_images(run, run["task_il"]["accuracy"])[-1] for run in runs]
        figures = [[one[-1] for one in ones], [statistics.fmean(one) for one in ones], grouped, known]
        rows.append([SINGLE[recipe], *map(mean_and_spread, figures), str(len(runs)), ELSEWHERE[recipe]])
    note = f"Over all images of the classes so far, after the last task or (AIA) after each. {_where()} Elsewhere: the "
    note += "best published from scratch, without old images, on single images, last / AIA."
    return markdown([*head, "elsewhere"], rows, note)


def cost_table() -> str:
    """Return what the recipes for single images cost, and how often they find the task."""
    head = ["CIFAR-100", "its task found, %", "weights taken, %", "training a task", "minutes for all"]
    rows = []
    for recipe, runs in _single_runs().items():
        selections = [run["class_il"]["Cascade"]["1"]["selection"] for run in runs]
        found = [over_images(run, selection)[-1] for run, selection in zip(runs, selections, strict=True)]
        taken = [run["subnetworks"][-1]["taken"] for run in runs]
        operations = statistics.fmean(sum(part["operations"] for part in run["subnetworks"]) for run in runs)
        figures = [mean_and_spread(found), mean_and_spread(taken), training_of(runs[0]), _minutes(recipe, runs)]
        rows.append([SINGLE[recipe], *figures, f"{operations / 1e9:.0f} G"])
    run = next(iter(_single_runs().values()))[0]
    note = (
        f"One ResNet-18 of {run['weights'] / 1e6:.1f} million weights for all tasks together. Every subnetwork looks "
    )
    note += "at an image in four turns and their mirror images; that many looks of the dense network are "
    note += f"{run['dense']['operations'] / 1e9:.1f} G operations. Minutes are those of runs that had the GPU to "
    note += f"themselves; where there is none, the quickest of those that shared it is an upper bound. {_where()}"
    return markdown([*head, "operations an image"], rows, note)


def _minutes(recipe: str, runs: list[dict[str, Any]]) -> str:
    minutes = {run["order"]: run["seconds"]["learn"] / 60 for run in runs}
    alone = [minutes[order] for order in minutes if order not in SHARED.get(recipe, ())]
    return mean_and_spread(alone) if alone else f"below {min(minutes.values()):.1f}"


def gain_table() -> str:
    """Return what the cascade gives over the largest output, on single images and in small groups."""
    head = ["CIFAR-100 (%)"]
    head += [f"{images}, {name}" for images in ("one image", "groups of 5") for name in ("largest output", "cascade")]
    rows = []
    for recipe, runs in _single_runs().items():
        found = [
            mean_and_spread([over_images(run, run["class_il"][name][size]["accuracy"])[-1] for run in runs])
            for size in ("1", "5")
            for name in ("MaxOutput", "Cascade")
        ]
        rows.append([SINGLE[recipe], *found])
    return markdown(head, rows, f"Over all images after the last task. {_where()}")


def single_picture() -> Figure:
    """Accuracy on single images after each task: trained for them, and as in the paper."""
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    for axes, tasks in zip(panels, (5, 10, 20), strict=True):
        single, plain = published_runs(f"cifar100-{tasks}-single"), published_runs(f"cifar100-{tasks}")
        places = range(1, tasks + 1)
        axes.plot(places, _mean_history(single, "task_il"), "s-", color=COLOURS["ceiling"], label="task known")
        axes.plot(places, _mean_history(single, "class_il"), "o-", color=COLOURS["ours"], label="one image")
        label = "one image, training of the paper"
        axes.plot(places, _mean_history(plain, "class_il"), "o--", color=COLOURS["other"], label=label)
        axes.set_title(f"{tasks} tasks of {100 // tasks}", fontsize=10)
        axes.set_xlabel("tasks learned")
        axes.set_ylim(0, 104)
        light_grid(axes)
    panels[0].set_ylabel("accuracy on all classes so far (%)")
    panels[0].legend(fontsize=8, frameon=False, loc="lower left")
    return figure


def _mean_history(runs: list[dict[str, Any]], kind: str) -> NDArray[Any]:
    """Return the accuracy after each task, the mean over runs; the class-IL one is the cascade's on single images."""
    entries = [run[kind] if kind == "task_il" else run[kind]["Cascade"]["1"] for run in runs]
    return np.mean([over_images(run, entry["accuracy"]) for run, entry in zip(runs, entries, strict=True)], axis=0)


def _where() -> str:
    return ran_on([run for runs in _single_runs().values() for run in runs])


def _single_runs() -> dict[str, list[dict[str, Any]]]:
    """Return the published runs of the recipes that have some."""
    return {recipe: runs for recipe in SINGLE if (runs := published_runs(recipe))}


def choice_table() -> str:
    """Return what each way of training gave after two tasks, on images held out of training."""
    rows = []
    for key, found in read("ablation-choice").items():
        parts = key.split(": ")[1].removeprefix("first").replace("+", ", ").removeprefix(", ").strip()
        best = found["class_il"]["largest output"]["1"]
        figures = [found["task_il"], statistics.fmean(found["auroc"]), best, found["taken"]]
        rows.append(
            [
                {"": "as it was first", "again": "the same again"}.get(parts, parts),
                *(f"{value:.1f}" for value in figures),
            ]
        )
    head = ["training", "task known", "AUROC", "one image, largest output", "weights taken"]
    run = next(iter(read("ablation-choice").values()))
    note = "All in %; two of ten tasks, 500 images of each, AUROC against the images of all others; "
    note += f"{machine_of(run)}."
    return markdown(head, rows, note)


def streams_table() -> str:
    """Return the accuracy on images in a row, by how often their task changes."""
    run = read("streams")
    rates = list(next(iter(run["streams"].values())))
    rows = [
        [f"{training}, {name}", *(_mean([each["streams"][name][rate] for each in runs]) for rate in rates)]
        for training, runs in _streams().items()
        for name in ("Cascade", "MaxOutput")
    ]
    head = ["task changes after about", *(f"{1 / float(rate):.0f} images" for rate in rates[:-1]), "every image"]
    note = f"In %; mean of {run['draws']} streams of {run['images']:,} test images each; {_models()}."
    return markdown(head, rows, note)


def parts_table() -> str:
    """Return what single images lose by each part of the cascade that is off or weighed otherwise."""
    found = _streams()
    names = list(dict.fromkeys(name for runs in found.values() for run in runs for name in run["selectors"]))
    rows = [
        [name, *(_mean([r["selectors"][name][what] for r in runs if name in r["selectors"]])
                 for runs in found.values() for what in ("class", "task"))]
        for name in names
    ]  # fmt: skip
    head = [f"{what}, {training}" for training in found for what in ("one image", "task found")]
    return markdown(["selector", *head], rows, f"In %, 10,000 test images; {_models()}.")


def strangers_table() -> str:
    """Return how many known images and strangers are called unknown."""
    held_out = [found["strangers"] for found in read("strangers-held-out").values()]
    found = {training: [run["strangers"] for run in runs] for training, runs in _streams().items()}
    found["`-single`, a tenth held out"] = held_out
    key = "rejected (known, strangers)"
    rows = [
        [share, *(_mean([run[key][share][place] for run in runs]) for runs in found.values() for place in (0, 1))]
        for share in read("streams")["strangers"][key]
    ]
    for measure in ("AUROC", "FPR95"):
        figures = [statistics.fmean(run[measure] for run in runs) for runs in found.values()]
        rows.append([measure, *(cell for figure in figures for cell in ("", f"{figure:.2f}"))])
    head = [f"{who}, {training}" for training in found for who in ("known", "strangers")]
    note = "Test images called unknown, in %; five of ten tasks learned, the images of the others as strangers; "
    return markdown(
        ["`reject`", *head], rows, f"{note}{_models()}; a tenth of the training images held out: order 1605."
    )


def _streams() -> dict[str, list[dict[str, Any]]]:
    """Return what was measured on streams and strangers, by the training of the model."""
    orders = (1605, 2022)
    return {"paper's training": [read("streams")], "`-single`": [read(f"streams-single-{order}") for order in orders]}


def _models() -> str:
    warned = []
    for runs in _streams().values():
        orders = " and ".join(str(run["order"]) for run in runs)
        warned.append(f"`{runs[0]['recipe']}`, order{'s' if len(runs) > 1 else ''} {orders} ({machine_of(runs[0])})")
    return ", ".join(warned)


def _mean(values: list[float]) -> str:
    return f"{statistics.fmean(values):.1f}" if values else ""
