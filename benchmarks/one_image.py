"""Tables of docs/one-image.md."""

import statistics
from typing import Any

from benchmarks.published import machine_of, markdown, published_runs, ran_on, reached, read
from cps.comparison import mean_and_spread, training_of

SINGLE = {
    "cifar100-10-single": "10 tasks of 10",
    "cifar100-20-single": "20 tasks of 5",
    "cifar100-5-single": "5 tasks of 20",
    "cifar100-b50-single": "50, then 5 tasks of 10",
}


def single_table() -> str:
    """Return what the recipes for single images reach, and what they cost."""
    head = ["CIFAR-100", "orders", "one image", "groups of 20", "its task found", "AIA", "task known", "weights taken"]
    head += ["training a task", "minutes for all", "operations an image"]
    found = _single_runs()
    every = [run for runs in found.values() for run in runs]
    rows = []
    for cut, runs in found.items():
        ones = [run["class_il"]["Cascade"]["1"] for run in runs]
        figures = [
            [statistics.fmean(one["selection"][-1]) for one in ones],
            [one["AIA"] for one in ones],
            [run["task_il"]["ACC"] for run in runs],
            [run["subnetworks"][-1]["taken"] for run in runs],
        ]
        minutes = mean_and_spread([run["seconds"]["learn"] / 60 for run in runs])
        operations = statistics.fmean(sum(part["operations"] for part in run["subnetworks"]) for run in runs)
        cells = [str(len(runs)), *(reached(runs, "Cascade", size) for size in ("1", "20"))]
        costs = [training_of(runs[0]), minutes, f"{operations / 1e9:.0f} G"]
        rows.append([cut, *cells, *map(mean_and_spread, figures), *costs])
    note = f"In %; one ResNet-18 of {every[0]['weights'] / 1e6:.1f} million weights for all tasks together. Every "
    note += "subnetwork looks at an image in four turns and their mirror images; that many looks of the dense network "
    note += f"are {every[0]['dense']['operations'] / 1e9:.1f} G operations. {ran_on(every)}"
    return markdown(head, rows, note)


def single_sentence() -> str:
    """Return what the recipes for single images reach, in a few words."""
    found = []
    for cut, runs in _single_runs().items():
        one, twenty = (reached(runs, "Cascade", size) for size in ("1", "20"))
        orders = f"{len(runs)} order{'s' * (len(runs) > 1)}"
        found.append(f"{one}% of single images and {twenty}% in groups of 20 in {cut} ({orders})")
    return "; ".join(found) + "."


def _single_runs() -> dict[str, list[dict[str, Any]]]:
    """Return the published runs of the recipes that have some, by how they cut CIFAR-100."""
    return {cut: runs for name, cut in SINGLE.items() if (runs := published_runs(name))}


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
    rows = [[name, *(f"{found[rate]:.1f}" for rate in rates)] for name, found in run["streams"].items()]
    head = ["task changes after about", *(f"{1 / float(rate):.0f} images" for rate in rates[:-1]), "every image"]
    note = f"Mean of {run['draws']} streams of {run['images']:,} test images each; {_model_of(run)}."
    return markdown(head, rows, note)


def parts_table() -> str:
    """Return what single images lose by each part of the cascade that is off or weighed otherwise."""
    run = read("streams")
    rows = [[name, f"{found['class']:.1f}", f"{found['task']:.1f}"] for name, found in run["selectors"].items()]
    note = f"In %, 10,000 test images; {_model_of(run)}."
    return markdown(["selector", "one image", "its task found"], rows, note)


def _model_of(run: dict[str, Any]) -> str:
    return f"`{run['recipe']}`, order {run['order']}; {machine_of(run)}"


def strangers_table() -> str:
    """Return how many known images and strangers are called unknown."""
    run = read("streams")
    found = run["strangers"]
    rows = [
        [share, *(f"{value:.1f}" for value in cells)] for share, cells in found["rejected (known, strangers)"].items()
    ]
    note = f"AUROC {found['AUROC']:.2f}, FPR95 {found['FPR95']:.2f}; {_model_of(run)}; five of ten tasks "
    note += "learned, the test images of the others as strangers."
    return markdown(["`reject`", "known images rejected, %", "strangers rejected, %"], rows, note)
