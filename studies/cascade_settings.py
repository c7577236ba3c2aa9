"""`python -m studies.cascade_settings RECIPE:ORDER... --out FILE`: settings of the cascade, on held-out images.

A share of the training images of each run is held out. The outputs of all subnetworks for these images are then given
to cascades with every combination of settings; no test image is used. Models are saved in `--models`. The command can
be interrupted at any time: running it again resumes after the last learned task.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import cps
from cps.data.examples import as_examples, read_labels
from cps.data.tasks import split_by_class
from cps.evaluation.evaluator import run_test_images
from cps.experiments.recipes import RECIPES
from cps.network.subnetwork import local_labels
from cps.runtime.environment import describe_device, versions
from cps.selection.base import Statistics
from cps.selection.gather import gather_evidence
from studies.measurement import is_task_found, percent
from studies.published import describe_machine, markdown, read_json, write_compact

GRID: dict[str, tuple[float, ...]] = {
    "size": (8, 16, 32, 64, 128),
    "shrinkage": (0.01, 0.03, 0.1, 0.3, 1.0),
    "temperature": (1.0, 2.0, 3.0, 4.0, 6.0, 10.0),
    "logit_weight": (0.0, 0.5, 1.0, 2.0, 4.0),
}


def main() -> None:
    """Measure the given runs; those that are already in the file are not repeated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", help="RECIPE:ORDER; the order is a seed")
    parser.add_argument("--data", type=Path, default=None, help="folder of the data set")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path, default=Path("runs/cascade-settings"), help="folder of the models")
    parser.add_argument("--hold-out", type=float, default=0.1, help="share of the training images to hold out")
    parser.add_argument("--tasks", type=int, default=None, help="number of tasks to learn")
    parser.add_argument("--epochs-scale", type=float, default=1.0, help="factor for the number of epochs")
    arguments = parser.parse_args()
    done = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {}
    for run in arguments.runs:
        how = f"{arguments.hold_out:g} held out, epochs x {arguments.epochs_scale:g}, tasks {arguments.tasks or 'all'}"
        key = f"{run}, {how}"
        if key not in done:
            done[key] = _measure(arguments, run, key)
            write_compact(arguments.out, done)


def combinations() -> Iterator[dict[str, float]]:
    """Yield every combination of settings, in the order in which results list them."""
    for values in product(*GRID.values()):
        yield dict(zip(GRID, values, strict=True))


def settings_table() -> str:
    """Return the table of accuracy on held-out images with other settings of the cascade than the default."""
    keys: dict[str, list[str]] = {}  # of runs that differ only in their order
    for key in read_json("cascade-settings"):
        recipe, held_out = key.split(":")[0], key.split(", ")[1]
        keys.setdefault(f"`{recipe}`, {held_out}", []).append(key)
    groups = {name: [read_json("cascade-settings")[key] for key in same] for name, same in keys.items()}
    indices = {tuple(values.values()): index for index, values in enumerate(combinations())}
    defaults = {name: getattr(cps.Cascade(), name) for name in GRID}
    default, rows = indices[tuple(defaults.values())], []
    for name, values in GRID.items():
        for value in values:
            index = indices[tuple({**defaults, name: value}.values())]
            label = f"`{name}` {value:g}" + (" (default)" if index == default else "")
            rows.append([label, *(_format_difference(runs, index, default) for runs in groups.values())])
    rows.append([f"best of {len(indices)} combinations", *(f"{_best(runs):.1f}" for runs in groups.values())])
    known = [statistics.fmean(run["task known"] for run in runs) for runs in groups.values()]
    rows.append(["task known", *(f"{value:.1f}" for value in known)])
    closed = read_json("closed-form-rows")["settings"]
    for name in ("one image", "task known"):
        cells = [f"{statistics.fmean(closed[key][name] for key in same):.1f}" for same in keys.values()]
        rows.append([f"closed form, {name}", *cells])
    rows.append(["orders x images", *(f"{len(runs)} x {runs[0]['images']:,}" for runs in groups.values())])
    first = next(iter(groups.values()))[0]
    note = "Accuracy on single images in %. In brackets: the difference from the default, with its standard deviation "
    note += f"over orders. {describe_machine(first['device'], first['versions'])}."
    return markdown(["setting", *groups], rows, note)


def _best(runs: list[dict[str, Any]]) -> float:
    return max(map(statistics.fmean, zip(*(run["one image"] for run in runs), strict=True)))


def _format_difference(runs: list[dict[str, Any]], index: int, default: int) -> str:
    """Return the mean accuracy of a combination, and its difference from the default with the standard deviation."""
    accuracies = [run["one image"][index] for run in runs]
    differences = [run["one image"][index] - run["one image"][default] for run in runs]
    mean = f"{statistics.fmean(accuracies):.1f}"
    if index == default:
        return mean
    deviation = f" ± {statistics.stdev(differences):.1f}" if len(runs) > 1 else ""
    return f"{mean} ({statistics.fmean(differences):+.1f}{deviation})"


def _measure(arguments: argparse.Namespace, run: str, key: str) -> dict[str, Any]:
    """Learn the tasks of a run, or load the model, and measure cascades with every combination of settings."""
    name, order = run.split(":")
    recipe = RECIPES[name]().with_scaled_epochs(arguments.epochs_scale)
    train, _ = recipe.read(arguments.data)
    scenario = split_by_class(train, None, sizes=recipe.sizes, order=int(order), validation=arguments.hold_out)
    tasks = [replace(task, test=task.val) for task in scenario][: arguments.tasks]
    fabric = cps.make_fabric()
    settings = {**recipe.learner_settings(), "seed": int(order), "fabric": fabric}
    model = arguments.models / f"{key}.cps"
    if model.exists():
        learner = cps.load(model, recipe.backbone(), **settings)
    else:
        learner = cps.Learner(recipe.make_backbone(int(order)), **settings)
    model.parent.mkdir(parents=True, exist_ok=True)
    for task in tasks[len(learner.classes) :]:
        learner.learn(task)
        learner.save(model)
        print(f"{key}: {len(learner.classes)} tasks", flush=True)
    test = run_test_images(learner, tasks)
    accuracies = [
        percent(is_task_found(cascade, kept, test) & test.is_correct) for cascade, kept in _cascades(learner, tasks)
    ]
    best = max(range(len(accuracies)), key=accuracies.__getitem__)
    print(f"{key}: best {list(combinations())[best]} {accuracies[best]:.2f}", flush=True)
    return {
        "images": len(test.task),
        "task known": percent(test.is_correct),
        "one image": accuracies,
        "device": describe_device(fabric),
        "versions": versions(),
    }


def _cascades(learner: cps.Learner, tasks: Sequence[cps.Task]) -> Iterator[tuple[cps.Cascade, list[Statistics]]]:
    """Yield a cascade with every combination of settings, with the statistics it would have kept of the tasks."""
    network, observed = learner.network, []
    for task in tasks:
        examples = as_examples(task.train, partial(local_labels, task.classes))
        labels = read_labels(examples).to(network.device)
        observed.append((gather_evidence(network, examples, learner.fabric), labels))
    by_size: dict[float, list[Statistics]] = {}
    for values in combinations():
        cascade = replace(cps.Cascade(), **values)
        if values["size"] not in by_size:  # no other setting changes the statistics
            by_size[values["size"]] = earlier = []
            for subnetwork, (evidence, labels) in zip(network.subnetworks, observed, strict=True):
                so_far = evidence.first(len(earlier) + 1)
                earlier.append(cascade.observe(subnetwork, so_far, labels, tuple(earlier)))
        yield cascade, by_size[values["size"]]


if __name__ == "__main__":
    main()
