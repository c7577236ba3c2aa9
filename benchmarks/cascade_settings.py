"""`python -m benchmarks.cascade_settings RECIPE:ORDER... --out FILE`: the cascade's settings, by held-out images.

A share of the training images of each run is held out. What the subnetworks say about all of them is then looked at by
cascades of every combination of settings; no test image is. Models are kept in `--models`, and a run that was stopped
goes on after its last task when the same command is given again.
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
from benchmarks.paper import compact
from benchmarks.records import machine_of, markdown, read
from benchmarks.strangers import percent
from benchmarks.streams import found_by
from cps.data.examples import all_labels, as_examples
from cps.data.tasks import split_by_class
from cps.evaluation.evaluator import look
from cps.experiments.recipes import RECIPES
from cps.network.subnetwork import local_labels
from cps.runtime.environment import describe_device, versions
from cps.selection.base import Statistics
from cps.selection.gather import gather_evidence
from cps.storage.container import write_text

GRID: dict[str, tuple[float, ...]] = {
    "size": (8, 16, 32, 64, 128),
    "shrinkage": (0.01, 0.03, 0.1, 0.3, 1.0),
    "temperature": (1.0, 2.0, 3.0, 4.0, 6.0, 10.0),
    "logit_weight": (0.0, 0.5, 1.0, 2.0, 4.0),
}


def main() -> None:
    """Measure the runs that were asked for; those in the file already are not measured again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", help="RECIPE:ORDER, the order a seed")
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path, default=Path("runs/cascade-settings"))
    parser.add_argument("--hold-out", type=float, default=0.1, help="share of the training images")
    parser.add_argument("--tasks", type=int, default=None, help="only the first so many")
    parser.add_argument("--epochs-scale", type=float, default=1.0)
    arguments = parser.parse_args()
    done = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for run in arguments.runs:
        how = f"{arguments.hold_out:g} held out, epochs x {arguments.epochs_scale:g}, tasks {arguments.tasks or 'all'}"
        key = f"{run}, {how}"
        if key not in done:
            done[key] = _measure(arguments, run, key)
            write_text(arguments.out, compact(done))


def settings() -> Iterator[dict[str, float]]:
    """Yield every combination of settings, in the order in which results list them."""
    for values in product(*GRID.values()):
        yield dict(zip(GRID, values, strict=True))


def settings_table() -> str:
    """Return what other settings of the cascade give on held-out images, beside the default ones."""
    alike: dict[str, list[dict[str, Any]]] = {}  # runs that differ in their order alone
    for key, run in read("cascade-settings").items():
        recipe, held_out = key.split(":")[0], key.split(", ")[1]
        alike.setdefault(f"`{recipe}`, {held_out}", []).append(run)
    places = {tuple(values.values()): place for place, values in enumerate(settings())}
    usual = {name: getattr(cps.Cascade(), name) for name in GRID}
    default, rows = places[tuple(usual.values())], []
    for name, values in GRID.items():
        for value in values:
            place = places[tuple({**usual, name: value}.values())]
            warned = f"`{name}` {value:g}" + (" (default)" if place == default else "")
            rows.append([warned, *(_beside(runs, place, default) for runs in alike.values())])
    rows.append([f"best of {len(places)} combinations", *(f"{_best(runs):.1f}" for runs in alike.values())])
    known = [statistics.fmean(run["task known"] for run in runs) for runs in alike.values()]
    rows.append(["task known", *(f"{value:.1f}" for value in known)])
    rows.append(["orders x images", *(f"{len(runs)} x {runs[0]['images']:,}" for runs in alike.values())])
    note = "Single images right, in %; in brackets the difference to the default, and its standard deviation over "
    note += f"orders; {machine_of(next(iter(alike.values()))[0])}."
    return markdown(["setting", *alike], rows, note)


def _best(runs: list[dict[str, Any]]) -> float:
    return max(map(statistics.fmean, zip(*(run["one image"] for run in runs), strict=True)))


def _beside(runs: list[dict[str, Any]], place: int, default: int) -> str:
    found = [run["one image"][place] for run in runs]
    more = [run["one image"][place] - run["one image"][default] for run in runs]
    mean = f"{statistics.fmean(found):.1f}"
    if place == default:
        return mean
    spread = f" ± {statistics.stdev(more):.1f}" if len(runs) > 1 else ""
    return f"{mean} ({statistics.fmean(more):+.1f}{spread})"


def _measure(arguments: argparse.Namespace, run: str, key: str) -> dict[str, Any]:
    name, order = run.split(":")
    recipe = RECIPES[name]().scaled(arguments.epochs_scale)
    train, _ = recipe.read(arguments.data)
    scenario = split_by_class(train, None, sizes=recipe.sizes, order=int(order), validation=arguments.hold_out)
    tasks = [replace(task, test=task.val) for task in scenario][: arguments.tasks]
    fabric = cps.make_fabric()
    chosen = {**recipe.learner_settings(), "seed": int(order), "fabric": fabric}
    model = arguments.models / f"{key}.cps"
    if model.exists():
        learner = cps.load(model, recipe.backbone(), **chosen)
    else:
        learner = cps.Learner(recipe.drawn(int(order)), **chosen)
    model.parent.mkdir(parents=True, exist_ok=True)
    for task in tasks[len(learner.classes) :]:
        learner.learn(task)
        learner.save(model)
        print(f"{key}: {len(learner.classes)} tasks", flush=True)
    tested = look(learner, tasks)
    right = [percent(found_by(cascade, kept, tested) & tested.right) for cascade, kept in _cascades(learner, tasks)]
    best = max(range(len(right)), key=right.__getitem__)
    print(f"{key}: best {list(settings())[best]} {right[best]:.2f}", flush=True)
    return {
        "images": len(tested.task),
        "task known": percent(tested.right),
        "one image": right,
        "device": describe_device(fabric),
        "versions": versions(),
    }


def _cascades(learner: cps.Learner, tasks: Sequence[cps.Task]) -> Iterator[tuple[cps.Cascade, list[Statistics]]]:
    """Yield a cascade of every combination of settings, with the numbers that it would have kept of the tasks."""
    network, seen = learner.network, []
    for task in tasks:
        examples = as_examples(task.train, partial(local_labels, task.classes))
        seen.append((gather_evidence(network, examples, learner.fabric), all_labels(examples).to(network.device)))
    kept: dict[float, list[Statistics]] = {}
    for values in settings():
        cascade = replace(cps.Cascade(), **values)
        if values["size"] not in kept:  # the only one that matters for what is kept
            kept[values["size"]] = so_far = []
            for subnetwork, (evidence, labels) in zip(network.subnetworks, seen, strict=True):
                until_then = evidence.until(len(so_far) + 1)
                so_far.append(cascade.observe(subnetwork, until_then, labels, tuple(so_far)))
        yield cascade, kept[values["size"]]


if __name__ == "__main__":
    main()
