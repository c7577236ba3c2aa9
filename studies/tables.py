"""Tables and plots of the documentation, made from benchmarks/results; `python -m studies.tables` updates them all."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks import growth

from cps.experiments.aggregate import (
    Table,
    accuracy_table,
    describe_training,
    format_mean,
    metrics_table,
    task_table,
)
from cps.experiments.plots import plot_accuracy_history, plot_final_accuracy, plot_group_sizes
from cps.experiments.results import Results
from studies import (
    behind_trunk,
    closed_forms,
    default_training,
    far_domain,
    fusion_settings,
    one_image,
    photo_folders,
    precision,
    rivals,
    unknown_images,
)
from studies.ablation import ablation_table, choice_table
from studies.capacity import capacity_table
from studies.cascade_settings import settings_table
from studies.published import (
    ROOT,
    closed_form_accuracy,
    closed_form_of,
    describe_closed_form,
    describe_machine,
    describe_runs,
    markdown,
    mean_accuracy,
    published_runs,
    read_json,
    read_run,
)
from studies.streams import selectors_table, streams_table, unknown_images_table

RENAMED_LABELS = {  # patterns of labels in the published benchmarks -> the labels that benchmarks write since
    "by our own kernels, against torch.compile's": "with our kernels, against torch.compile",
    "until the first step of either, in a new process": "time until the first step, in a new process",
    "counting only the kernels that are on of": "counting only active kernels,",
    "subnetworks look at one image eight times, against": "subnetworks, 8 views of one image, against",
    "8 views of one image, against look by look": "8 views of one image, against one view at a time",
    "8 views of one image, against two looks": "8 views of one image, against 2 views",
    "8 views of one image, against one$": "8 views of one image, against 1 view",
    "one image of 5 tasks by the cascade, against by the largest output": "prediction of one image, 5 tasks, cascade "
    "against largest output",
    "one image of 5 tasks in eight looks, against in two": "prediction of one image, 5 tasks, 8 views against 2",
    "against after a few": "against an early task",
    "bytes a task": "bytes per task",
    "memory at its peak": "peak memory",
    ": the largest ratio": ", largest ratio",
}


def digits_table() -> str:
    """Return the table of the demo in the README: the mean over ten class orders."""
    runs = published_runs("digits")
    head, rows = accuracy_table(runs)
    prefixes = {selector: f"cps {selector}" for run in runs for selector in run.class_il}
    shown = [[prefixes.get(label, label), *cells] for _, label, _, *cells in rows]
    seconds = format_mean([run.seconds.learn for run in runs])
    machine = describe_machine(runs[0].device, runs[0].versions)
    note = f"Mean and standard deviation over {len(runs)} class orders; {machine}; learning the five tasks took "
    note += f"{seconds} s. {describe_closed_form(runs[0])} `make demo` runs one order."
    return markdown(["accuracy (%) by group size", *head[3:]], shown, note)


def frozen_or_cps_table() -> str:
    """Return the table of cps beside a closed form over features that nobody trained for the tasks."""
    labels = {
        "digits": ("digits, 5 tasks", "20 + 2 x 10 epochs", "Fusion"),
        "cub200": ("bird photos (CUB-200), 4 tasks, pretrained ResNet-18", "40 + 30 epochs", "Cascade"),
        "cifar100-10": ("CIFAR-100, 10 tasks", "the paper's training", "Cascade"),
        "cifar100-10-single": ("CIFAR-100, 10 tasks", "trained for single images", "Cascade"),
        "cifar100-20-single": ("CIFAR-100, 20 tasks", "trained for single images", "Cascade"),
        "cifar100-50": ("CIFAR-100, 50 tasks", "the paper's training", "Cascade"),
    }
    rows = []
    for recipe, (data, training, selector) in labels.items():
        runs = published_runs(recipe)
        known = format_mean([run.task_il.ACC for run in runs])
        entries = [entry for run in runs if (entry := closed_form_of(run)) is not None]
        assert len(entries) == len(runs), f"the closed form of {recipe} was not measured"
        cells = [known, format_mean([entry["task known"] for entry in entries])]
        for size in (20, 1):
            cells = [mean_accuracy(runs, selector, size), closed_form_accuracy(runs, size), *cells]
        rows.append([data, training, *cells, str(len(runs))])
    rows.append(far_domain.table_row())
    head = ["data", "cps", "one image: cps", "closed form", "groups of 20: cps", "closed form", "task known: cps"]
    note = (
        "Test images, ACC in %; mean and standard deviation over class orders. cps selects with `Fusion` on the digits "
    )
    note += (
        "and the spectrograms, and with `Cascade` elsewhere: those runs are older than the fusion. The closed forms "
        "are those of the table above, and for the spectrograms the best one on held-out images."
    )
    return markdown([*head, "closed form", "orders"], rows, note)


def speed_table(name: str) -> str:
    """Return the table of a run of all benchmarks."""
    run = read_json(name)
    rows = [
        [_label(row["what"]), row["ours"], row["baseline"], f"{row['ratio']:.2f}", _limit(row)]
        for row in run["results"]
    ]
    note = f"{describe_machine(run['device'], run['versions'])}; all benchmarks took {run['seconds']:.0f} s."
    return markdown(["benchmark", "ours", "baseline", "ratio", "limit"], rows, note)


def whole_run_table() -> str:
    """Return the table of how long the experiments of the paper take from start to end."""
    runs = [read_run(f"timed/cifar100-{tasks}-1993") for tasks in (5, 10, 20)]
    rows = []
    for run in runs:
        parts = [run.seconds.learn, run.seconds.evaluate]
        times = [f"{value:.1f}" for value in (*parts, sum(parts))]
        accuracies = [mean_accuracy([run], "Cascade", size) for size in (20, 1)]
        accuracies += [closed_form_accuracy([run], size) for size in (20, 1)]
        rows.append([run.recipe, describe_training(run), *times, *accuracies])
    head = ["recipe", "training of a task", "learning (s)", "evaluation at all group sizes (s)", "total (s)"]
    note = f"Order 1993; {describe_machine(runs[0].device, runs[0].versions)}; nothing else ran on the machine."
    head += ["groups of 20 (%)", "one image (%)", "closed form, groups of 20 (%)", "closed form, one image (%)"]
    return markdown(head, rows, note)


def many_tasks_table() -> str:
    """Return the table of what a prediction costs with ten, a hundred and a thousand tasks."""
    found = read_json("many-tasks-cpu")
    rows = [
        [
            f"{int(tasks):,}",
            *(f"{1e3 * row[f'batch of {batch}']:.1f}" for batch in (1, 128)),
            f"{row['learning a task']:.2f}",
            f"{row['bytes of a task'] / 1024:.0f}",
            f"{row['accuracy']:.1f}",
        ]
        for tasks, row in found["tasks"].items()
    ]
    note = f"Tasks of two classes, 8 x 8 images, a small network, one thread. With {max(map(int, found['tasks'])):,} "
    note += f"tasks, {found['likely']:.1f}% of {found['images']:,} images are right if the likely subnetworks run and "
    note += f"{found['all']:.1f}% if all do. {describe_machine(found['device'], found['versions'])}."
    head = ["tasks", "one image (ms)", "128 images (ms)", "learning a task (s)", "statistics of a task (KiB)"]
    return markdown([*head, "right (%)"], rows, note)


def paper_table(make: Callable[[Sequence[Results]], Table], *recipes: str) -> str:
    """Return a table of the published runs with a note about them."""
    runs = published_runs(*recipes)
    closed = dict.fromkeys(filter(None, map(describe_closed_form, runs)))
    return markdown(*make(runs), " ".join([describe_runs(runs), *closed]))


def cifar_table() -> str:
    """Return the table of the main results on CIFAR-100 in 5, 10, 20 and 50 tasks."""
    rows = []
    for tasks in (5, 10, 20, 50):
        runs = published_runs(f"cifar100-{tasks}")
        cells = [mean_accuracy(runs, *which) for which in (("Cascade", 1), ("MaxOutput", 1), ("Cascade", 20))]
        cells.append(format_mean([run.task_il.ACC for run in runs]))
        cells += [closed_form_accuracy(runs, size) for size in (1, 20)]
        cells.append(format_mean([run.subnetworks[-1].taken for run in runs]))
        rows.append([f"{tasks} tasks of {100 // tasks}", *cells, str(len(runs))])
    head = ["CIFAR-100 (%)", "one image", "one image, paper's selector", "groups of 20", "task known"]
    head += ["closed form, one image", "closed form, groups of 20", "weights taken", "orders"]
    runs = published_runs("cifar100-10")
    return markdown(head, rows, f"{describe_runs(runs)} {describe_closed_form(runs[0])}")


def model_files_table() -> str:
    """Return the table of the results of fuzzing model files."""
    run = read_json("fuzz-model-files")
    head = ["kind", *next(iter(run["counts"].values()))]
    rows = [[kind, *(f"{number:,}" for number in counts.values())] for kind, counts in run["counts"].items()]
    note = f"{run['cases']:,} cases in {run['minutes']:.0f} minutes with at most {run['mebibytes']:.0f} MiB of memory; "
    return markdown(head, rows, f"{note}{describe_machine(run['device'], run['versions'])}.")


def load_table() -> str:
    """Return the table of the server under load."""
    run = read_json("serving-cpu")
    head = ["clients", "images per second", "median (ms)", "95th percentile (ms)", "answered (200)", "rejected (503)"]
    rows = []
    for row in run["rows"]:
        times = [f"{row[name]:.0f}" for name in ("per_second", "median_ms", "p95_ms")]
        counts = [f"{row[name]:,}" for name in ("answered", "told_to_come_back")]
        rows.append([str(row["clients"]), *times, *counts])
    note = f"{run['model']}; {run['seconds']:.0f} seconds each; server and clients on the same machine: "
    return markdown(head, rows, f"{note}{describe_machine(run['device'], run['versions'])}.")


def requests_sentence() -> str:
    """Return the sentence about fuzzing the server with requests."""
    run = read_json("fuzz-server")
    return (
        f"{run['requests']:,} requests in {run['minutes']:.0f} minutes, {run['passed']:,} passed; schemathesis "
        f"{run['versions']['schemathesis']}, seed {run['seed']}; {describe_machine(run['device'], run['versions'])}."
    )


def predict_files_sentence() -> str:
    """Return the sentence about how fast `cps predict` predicts a folder of images."""
    run = read_json("inbox-cpu")
    return (
        f"Measured: {run['images']:,} files one by one, {run['per_minute']:,.0f} per minute, "
        f"{run['core_ms_per_image']:.0f} ms of CPU time each, after {run['start_seconds']:.0f} seconds to start "
        f"({run['model']}; {describe_machine(run['device'], run['versions'])})."
    )


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"digits": digits_table, "single": one_image.accuracy_table},
    "docs/performance.md": {
        "h200": partial(speed_table, "benchmarks-h200"),
        "whole": whole_run_table,
        "cpu": partial(speed_table, "benchmarks-cpu"),
        "one-thread": partial(speed_table, "benchmarks-one-thread"),
    },
    "docs/devices.md": {"precision": precision.accuracy_table},
    "docs/settings.md": {"default-training": default_training.training_table},
    "docs/reproducing.md": {
        "cifar": cifar_table,
        "accuracy": partial(paper_table, accuracy_table),
        "metrics": partial(paper_table, metrics_table),
        "row": partial(paper_table, partial(task_table, size=20), "cifar100-20"),
    },
    "docs/one-image.md": {
        "single": one_image.accuracy_table,
        "streams": streams_table,
        "unknown-images": unknown_images_table,
        "unknown-images-rules": unknown_images.comparison_table,
    },
    "docs/one-image-measured.md": {
        "gain": one_image.gain_table,
        "settings": settings_table,
        "parts": selectors_table,
        "single-cost": one_image.cost_table,
        "choice": choice_table,
        "ablation": ablation_table,
    },
    "docs/closed-form.md": {
        "closed-forms": closed_forms.accuracy_table,
        "closed-forms-choice": closed_forms.choice_table,
        "frozen-or-cps": frozen_or_cps_table,
        "far-domain": far_domain.spaces_sentence,
        "fusion-results": fusion_settings.results_table,
        "fusion-settings": fusion_settings.settings_table,
        "many-tasks": many_tasks_table,
    },
    "docs/method.md": {"capacity": capacity_table},
    "docs/methods.md": {
        "methods-digits": partial(rivals.comparison_table, "digits"),
        "methods-small": partial(rivals.comparison_table, "small", "small-main"),
        "methods-cub200-1000": partial(rivals.comparison_table, "cub200-trunk-1000"),
        "methods-cub200-2000": partial(rivals.comparison_table, "cub200-trunk-2000"),
    },
    "docs/reliability.md": {"model-files": model_files_table, "load": load_table, "requests": requests_sentence},
    "docs/practitioners.md": {
        "photo-folders": partial(photo_folders.commands_table, "CUB-200"),
        "photo-folders-cifar": partial(photo_folders.commands_table, "CIFAR-100"),
        "photo-folders-orders": photo_folders.orders_table,
        "behind-trunk": behind_trunk.gain_table,
        "predict-files": predict_files_sentence,
    },
}


def update_page(page: str) -> str:
    """Return the text of a page with its tables made again, each between its markers."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, make in TABLES[page].items():
        pattern, table = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", make()
        text, found = re.subn(pattern, lambda match: f"{match[1]}{table}\n{match[2]}", text, flags=re.S)  # noqa: B023
        assert found == 1, f"{page} must have one place for the table '{name}', found {found}"
    return text


def main() -> None:
    """Update every table and plot."""
    for page in TABLES:
        (ROOT / page).write_text(update_page(page), encoding="utf-8")
    digits = read_run("digits")
    docs = ROOT / "docs"
    plot_accuracy_history(digits).savefig(docs / "digits.png", dpi=110)
    plot_group_sizes([digits]).savefig(docs / "one-image.png", dpi=110)
    plot_group_sizes(published_runs("cifar100-10")).savefig(docs / "cifar100-groups.png", dpi=110)
    plot_final_accuracy(published_runs("cifar100-20")[0]).savefig(docs / "cifar100-20.png", dpi=110)
    one_image.plot_single_images().savefig(docs / "single.png", dpi=100)
    for name in ("cpu", "h200"):
        growth.plot(read_json(f"benchmarks-{name}")["growth"]).savefig(docs / f"growth-{name}.png", dpi=100)


def _label(text: str) -> str:
    """Return the label of a benchmark as it is written since."""
    for old, new in RENAMED_LABELS.items():
        text = re.sub(old, new, text)
    return text


def _limit(row: dict[str, Any]) -> str:
    """Return the limit of a ratio, and whether it is exceeded."""
    is_exceeded = row["limit"] is not None and round(row["ratio"], 2) > row["limit"]
    return f"{row['limit'] or ''}{', exceeded' if is_exceeded else ''}"


if __name__ == "__main__":
    main()
