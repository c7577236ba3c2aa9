"""Tables and pictures of the documentation, made from benchmarks/results; `python -m benchmarks.tables` renews them."""

import json
import re
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks import growth
from benchmarks.cascade_settings import settings_table
from benchmarks.left_out import ablation_table
from benchmarks.one_image import (
    choice_table,
    cost_table,
    gain_table,
    parts_table,
    single_picture,
    single_table,
    strangers_table,
    streams_table,
)
from benchmarks.records import RESULTS, ROOT, machine_of, markdown, published_runs, ran_on, reached, read
from cps.experiments.aggregate import accuracy_table, mean_and_spread, metrics_table, row_table, training_of
from cps.experiments.plots import accuracy_history, accuracy_on_each_task, group_sizes
from cps.experiments.report import group_table


def digits_table() -> str:
    """Return the table of the demo in the README."""
    run = read("digits")
    note = f"One run, seed {run['seed']}, {machine_of(run)}; "
    note += f"{run['seconds']['learn']:.0f} s to learn the five tasks."
    return markdown(*group_table(run), note)


def speed_table(name: str) -> str:
    """Return the table of a run of all benchmarks."""
    run = read(name)
    head = ["what", "ours", "against", "ratio", "at most"]
    rows = [[row["what"], row["ours"], row["baseline"], f"{row['ratio']:.2f}", _limit(row)] for row in run["results"]]
    note = f"{machine_of(run)}; all in {run['seconds']:.0f} s."
    return markdown(head, rows, note)


def _limit(row: dict[str, Any]) -> str:
    """Return what a ratio should stay below, and whether it does."""
    is_missed = row["limit"] is not None and round(row["ratio"], 2) > row["limit"]
    return f"{row['limit'] or ''}{', missed' if is_missed else ''}"


def whole_table() -> str:
    """Return how long the paper's experiments take from the first image to the last figure."""
    runs = [json.loads((RESULTS / "timed" / f"cifar100-{tasks}-1993.json").read_text()) for tasks in (5, 10, 20)]
    rows = []
    for run in runs:
        parts = [run["seconds"]["learn"], run["seconds"]["evaluate"]]
        times = [f"{value:.1f}" for value in (*parts, sum(parts))]
        rows.append([run["recipe"], training_of(run), *times, *(reached([run], "Cascade", n) for n in ("20", "1"))])
    head = [
        "recipe",
        "training a task",
        "learning, s",
        "evaluation at all group sizes, s",
        "together, s",
        "groups of 20, %",
    ]
    note = f"Order 1993; {machine_of(runs[0])}, alone on the machine."
    return markdown([*head, "one image, %"], rows, note)


def paper_table(make: Callable[[list[dict[str, Any]]], tuple[list[str], list[list[str]]]], *recipes: str) -> str:
    """Return a table of the published runs, and where they ran."""
    runs = published_runs(*recipes)
    return markdown(*make(runs), ran_on(runs))


def cifar_table() -> str:
    """Return what comes of CIFAR-100 in 5, 10, 20 and 50 tasks, in a few figures."""
    rows = []
    for tasks in (5, 10, 20, 50):
        runs = published_runs(f"cifar100-{tasks}")
        found = [reached(runs, *way) for way in (("Cascade", "1"), ("MaxOutput", "1"), ("Cascade", "20"))]
        known = mean_and_spread([run["task_il"]["ACC"] for run in runs])
        taken = mean_and_spread([run["subnetworks"][-1]["taken"] for run in runs])
        rows.append([f"{tasks} tasks of {100 // tasks}", *found, known, taken, str(len(runs))])
    head = ["CIFAR-100 (%)", "one image", "one image, paper's selector", "groups of 20", "task known", "weights taken"]
    return markdown([*head, "orders"], rows, ran_on(published_runs("cifar100-10")))


def model_files_table() -> str:
    """Return what came of the fuzzed model files."""
    run = read("fuzz-model-files")
    head = ["kind", *next(iter(run["counts"].values()))]
    rows = [[kind, *(f"{number:,}" for number in counts.values())] for kind, counts in run["counts"].items()]
    note = f"{run['cases']:,} cases in {run['minutes']:.0f} minutes, {run['mebibytes']:.0f} MiB of memory at most; "
    note += f"{machine_of(run)}."
    return markdown(head, rows, note)


def load_table() -> str:
    """Return how a server does under load."""
    run = read("serving-cpu")
    head = ["clients", "images in a second", "median ms", "95% within ms", "answered", "told to come back"]
    names = ("answered", "told_to_come_back")
    rows = [
        [str(row["clients"]), f"{row['per_second']:.0f}", f"{row['median_ms']:.0f}", f"{row['p95_ms']:.0f}"]
        + [f"{row[name]:,}" for name in names]
        for row in run["rows"]
    ]
    note = f"{run['model']}; {run['seconds']:.0f} seconds each; server and clients on one machine: "
    note += f"{machine_of(run)}."
    return markdown(head, rows, note)


def requests_sentence() -> str:
    """Return what came of the requests made to break a server."""
    run = read("fuzz-server")
    return (
        f"{run['requests']:,} requests in {run['minutes']:.0f} minutes, {run['passed']:,} passed; schemathesis "
        f"{run['versions']['schemathesis']}, seed {run['seed']}; {machine_of(run)}."
    )


def inbox_sentence() -> str:
    """Return how fast a folder of images is predicted."""
    run = read("inbox-cpu")
    return (
        f"Measured: {run['images']:,} files one by one, {run['per_minute']:,.0f} in a minute, "
        f"{run['core_ms_per_image']:.0f} ms of a core each, after {run['start_seconds']:.0f} seconds to start "
        f"({run['model']}; {machine_of(run)})."
    )


def crowding_table() -> str:
    """Return how well each task of the digits is learned in a network that fills up, by the way of sharing it."""
    run = read("crowding-cpu")
    tasks = range(len(next(iter(run["ways"].values()))[0]["task_il"]))
    rows = []
    for way, runs in run["ways"].items():
        each = [statistics.fmean(found["task_il"][task] for found in runs) for task in tasks]
        means = [statistics.fmean(found["task_il"]) for found in runs]
        free = statistics.fmean(found["free"][-1] for found in runs)
        rows.append([way, *(f"{value:.1f}" for value in each), mean_and_spread(means), f"{free:.0f}"])
    head = ["way", *(f"task {task + 1}" for task in tasks), "mean", "% free at the end"]
    orders = len(next(iter(run["ways"].values())))
    note = f"Mean over {orders} class orders; {machine_of(run)}."
    return markdown(head, rows, note)


TABLES = {
    "README.md": {"digits": digits_table, "cifar": cifar_table, "single": single_table},
    "docs/performance.md": {
        "h200": partial(speed_table, "benchmarks-h200"),
        "whole": whole_table,
        "cpu": partial(speed_table, "benchmarks-cpu"),
    },
    "docs/reproducing.md": {
        "accuracy": partial(paper_table, accuracy_table),
        "metrics": partial(paper_table, metrics_table),
        "row": partial(paper_table, partial(row_table, size="20"), "cifar100-20"),
    },
    "docs/one-image.md": {"single": single_table, "streams": streams_table, "strangers": strangers_table},
    "docs/one-image-measured.md": {
        "gain": gain_table,
        "settings": settings_table,
        "parts": parts_table,
        "single-cost": cost_table,
        "choice": choice_table,
        "ablation": ablation_table,
    },
    "docs/method.md": {"crowding": crowding_table},
    "docs/reliability.md": {"model-files": model_files_table, "load": load_table, "requests": requests_sentence},
    "docs/folders.md": {"inbox": inbox_sentence},
}


def renewed(page: str) -> str:
    """Return the text of a page with its tables made anew between their markers."""
    text = (ROOT / page).read_text()
    for name, make in TABLES[page].items():
        pattern = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
        text, found = re.subn(pattern, lambda match: match[1] + make() + "\n" + match[2], text, flags=re.S)  # noqa: B023
        assert found == 1, f"{page} has no place for the table {name}"
    return text


def main() -> None:
    """Write every table and picture."""
    for page in TABLES:
        (ROOT / page).write_text(renewed(page))
    accuracy_history(read("digits")).savefig(ROOT / "docs" / "digits.png", dpi=110)
    group_sizes([read("digits")]).savefig(ROOT / "docs" / "one-image.png", dpi=110)
    group_sizes(published_runs("cifar100-10")).savefig(ROOT / "docs" / "cifar100-groups.png", dpi=110)
    accuracy_on_each_task(published_runs("cifar100-20")[0]).savefig(ROOT / "docs" / "cifar100-20.png", dpi=110)
    single_picture().savefig(ROOT / "docs" / "single.png", dpi=100)
    for name in ("cpu", "h200"):
        growth.picture(read(f"benchmarks-{name}")["growth"]).savefig(ROOT / "docs" / f"growth-{name}.png", dpi=100)


if __name__ == "__main__":
    main()
