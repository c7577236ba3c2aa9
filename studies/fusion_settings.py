"""`python -m studies.fusion_settings RECIPE:ORDER... --out FILE`: settings of the fusion, on held-out images.

A share of the training images of each run is held out. Their outputs and features are given to fusions with every
combination of weights, with and without the cascade. Only then are the test images measured, with the default weights
and with the best ones on the held-out images. The command can be interrupted at any time: finished runs are not
repeated. With `--scores FOLDER` the scores of every part of the fusion are kept, so that others can be tried.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import cps
from cps.data.tasks import split_by_class
from cps.evaluation.evaluator import EvaluationOutputs, run_test_images
from cps.experiments.aggregate import format_mean
from cps.experiments.recipes import RECIPES, Recipe
from cps.runtime.environment import describe_device, versions
from cps.selection.base import precompute_once
from cps.selection.fusion import DEFAULT_WEIGHTS
from studies.measurement import is_class_found, percent
from studies.published import describe_machine, markdown, read_json, write_compact

TASK_WEIGHTS = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
CLASS_WEIGHTS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
LIKELY = ((0.5, 2), (0.8, 3), (0.9, 4), (0.95, 8))  # certainty, most subnetworks
EQUAL_WEIGHTS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)  # of task and class, in the table
FIXED_WEIGHT = 0.25  # of task and class, with which the test images of every run are measured, too
ALWAYS = 10**9  # tasks up to which the cascade is used


def main() -> None:
    """Measure the given runs; those that are already in the file are not repeated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", help="RECIPE:ORDER; the order is a seed")
    parser.add_argument("--data", type=Path, default=None, help="folder of the data set")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hold-out", type=float, default=0.1, help="share of the training images to hold out")
    parser.add_argument("--epochs-scale", type=float, default=1.0, help="factor for the number of epochs")
    parser.add_argument("--filters", type=int, default=None, help="filters of RandomPatches as the shared space")
    parser.add_argument("--scores", type=Path, default=None, help="folder for the scores of every part of the fusion")
    arguments = parser.parse_args()
    done = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {}
    for run in arguments.runs:
        space = None if arguments.filters is None else cps.RandomPatches(arguments.filters)
        key = f"{run}, {arguments.hold_out:g} held out, epochs x {arguments.epochs_scale:g}, {space or 'default space'}"
        if key not in done:
            name, order = run.split(":")
            recipe = RECIPES[name]().with_scaled_epochs(arguments.epochs_scale)
            scores = arguments.scores and arguments.scores / f"{name}-{order}.safetensors"
            done[key] = measure(recipe, int(order), arguments.data, arguments.hold_out, space, scores)
            write_compact(arguments.out, done)
            print(key, done[key]["test"], flush=True)


def measure(
    recipe: Recipe, order: int, data: Path | None, hold_out: float, space: cps.Space | None, scores: Path | None = None
) -> dict[str, Any]:
    """Learn a run with a share of the images held out; measure fusions on those, and the best on test images.

    With a space, every task keeps its sum for the covariance, and mirror images are learned. With `scores`, this file
    gets the scores of every part of the fusion.
    """
    train, test = recipe.read(data)
    scenario = split_by_class(train, test, sizes=recipe.sizes, order=order, validation=hold_out, seed=order)
    fabric = cps.make_fabric()
    shared = cps.SharedSpace() if space is None else cps.SharedSpace(space, covariances=ALWAYS, flips=True)
    cascade = next((each for each in recipe.selectors if isinstance(each, cps.Cascade)), cps.Cascade())
    fusion = cps.Fusion(shared, cascade, cascade_tasks=ALWAYS)
    settings = {**recipe.learner_settings(), "seed": order, "fabric": fabric, "selectors": (fusion, cps.MaxOutput())}
    learner = cps.Learner(recipe.make_backbone(order), **settings)
    for task in scenario:
        learner.learn(task)
    held_out = run_test_images(learner, [replace(task, test=task.val) for task in scenario])
    results: dict[str, Any] = {"held out": {}, "likely": {}, "test": {}}
    for task_weight, class_weight in product(TASK_WEIGHTS, CLASS_WEIGHTS):
        selector = replace(fusion, task_weight=task_weight, class_weight=class_weight)
        results["held out"][f"{task_weight:g} {class_weight:g}"] = _accuracy(learner, selector, held_out)
    for certainty, most in LIKELY:
        selector = replace(fusion, cascade_tasks=0, certainty=certainty, most_subnetworks=most)
        results["likely"][f"{certainty:g} {most}"] = [
            _accuracy(learner, selector, held_out),
            _subnetworks(learner, selector, held_out),
        ]
    results["likely"]["all"] = _accuracy(learner, replace(fusion, cascade_tasks=0, certainty=1.0), held_out)
    images = run_test_images(learner, scenario)
    if scores is not None:
        write_scores(scores, learner, fusion, {"held out": held_out, "test": images})
    best = max(results["held out"], key=lambda weights: results["held out"][weights])
    task_weight, class_weight = map(float, best.split())
    chosen = replace(fusion, task_weight=task_weight, class_weight=class_weight)
    results["test"] = {
        f"Fusion {best}": _accuracy(learner, chosen, images),
        "Fusion": _accuracy(learner, replace(fusion, task_weight=FIXED_WEIGHT, class_weight=FIXED_WEIGHT), images),
        "Fusion, weights by log loss": _accuracy(learner, fusion, images),
        "weights by log loss": list(fusion.weights(learner.network.statistics("Fusion"))),
        "closed form": _accuracy(learner, fusion.shared, images),
        "Cascade": _accuracy(learner, fusion.cascade, images),
        "MaxOutput": _accuracy(learner, cps.MaxOutput(), images),
        "task known": percent(images.is_correct),
    }
    return {
        **results,
        "tasks": images.num_tasks,
        "images": [len(held_out.task), len(images.task)],
        "device": describe_device(fabric),
        "versions": versions(),
    }


def write_scores(path: Path, learner: cps.Learner, fusion: cps.Fusion, parts: Mapping[str, EvaluationOutputs]) -> None:
    """Write the log probabilities of classes in the shared space, the scores of the cascade, and all logits."""
    shared = precompute_once(fusion.shared, _statistics(learner, fusion.shared))
    cascade = precompute_once(fusion.cascade, _statistics(learner, fusion.cascade))
    tensors: dict[str, torch.Tensor] = {}
    for name, part in parts.items():
        evidence = part.evidence()
        classes = [fusion.shared.score_classes(evidence, shared, task) for task in range(part.num_tasks)]
        tensors[f"{name}/classes"] = torch.cat(classes, dim=1).half()
        tensors[f"{name}/tasks"] = fusion.cascade.score_images(evidence, cascade).half()
        tensors[f"{name}/logits"] = torch.cat([outputs.logits for outputs in evidence], dim=1).half()
        tensors[f"{name}/task"], tensors[f"{name}/truth"] = part.task, part.truth
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.cpu().contiguous() for name, value in tensors.items()}, path)


def settings_table() -> str:
    """Return the table of accuracy on held-out images by the weights of the fusion."""
    groups = _groups()
    rows = []
    pairs = {f"{weight:g}": f"{weight:g} {weight:g}" for weight in EQUAL_WEIGHTS}
    pairs["{:g}, {:g} (default)".format(*DEFAULT_WEIGHTS)] = "{:g} {:g}".format(*DEFAULT_WEIGHTS)
    for label, key in pairs.items():
        cells = [_mean(run["held out"][key] for run in same if key in run["held out"]) for same in groups.values()]
        rows.append([label, *cells])
    best = [best_weights([run["held out"] for run in same]) for same in groups.values()]
    rows.append(["best pair", *(f"{accuracy:.1f} ({pair.replace(' ', ', ')})" for pair, accuracy in best)])
    for certainty, most in LIKELY:
        found = [[run["likely"][f"{certainty:g} {most}"] for run in same] for same in groups.values()]
        cells = [f"{_mean(a for a, _ in each)} ({_mean(n for _, n in each)})" for each in found]
        rows.append([f"no cascade, certainty {certainty:g}, at most {most}", *cells])
    rows.append(["no cascade, all", *(_mean(run["likely"]["all"] for run in same) for same in groups.values())])
    rows.append(["runs", *(str(len(same)) for same in groups.values())])
    note = (
        "Accuracy on single held-out images in % with equal weights of task and class, then with the best pair (task, "
        "class) of all. Without the cascade, the class weight is 0.25; in brackets the mean number of "
        f"subnetworks that ran for an image. CIFAR-100 with `RandomPatches(800)`. {_machines()}."
    )
    return markdown(["weights", *groups], rows, note)


def results_table() -> str:
    """Return the table of accuracy on test images with the weights that were best on held-out images."""
    rows = []
    for label, same in _groups().items():
        weights, _ = best_weights([run["held out"] for run in same])
        found = [run["test"] for run in same]
        fusion = [test.get(f"Fusion {weights}", test["Fusion"]) for test in found]
        names = ("closed form", "Cascade", "MaxOutput", "task known")
        cells = [format_mean([test[name] for test in found]) for name in names]
        is_fixed = any(f"Fusion {weights}" not in test for test in found)
        chosen = f"{FIXED_WEIGHT:g}, {FIXED_WEIGHT:g}" if is_fixed else weights.replace(" ", ", ")
        rows.append([label, chosen, format_mean(fusion), *cells, str(len(same))])
    head = ["data", "weights", "Fusion", "closed form", "Cascade", "MaxOutput", "task known", "orders"]
    note = (
        "Accuracy on single test images in %. All was learned on nine tenths of the training images; the others chose "
        "the weights, except where both are 0.25. CIFAR-100: shared space and closed form are "
        f"`RandomPatches(800)` with mirror images. {_machines()}."
    )
    return markdown(head, rows, note)


def best_weights(runs: Sequence[Mapping[str, float]]) -> tuple[str, float]:
    """Return the pair of weights, as text, with the best mean accuracy over runs, and that accuracy."""
    means = {pair: sum(run[pair] for run in runs) / len(runs) for pair in set.intersection(*map(set, runs))}
    best = max(sorted(means), key=lambda pair: means[pair])
    return best, means[best]


def safest_weights() -> tuple[float, ...]:
    """Return the pair of weights with the best mean accuracy among those that are nowhere below the shared space."""
    gains: dict[str, list[float]] = {}
    for same in _groups().values():
        for pair in set.intersection(*(set(run["held out"]) for run in same)):
            gain = sum(run["held out"][pair] - run["held out"]["0 0"] for run in same) / len(same)
            gains.setdefault(pair, []).append(gain)
    safe = [pair for pair, of_groups in gains.items() if len(of_groups) == len(_groups()) and min(of_groups) > -1e-9]
    return tuple(map(float, max(sorted(safe), key=lambda pair: sum(gains[pair])).split()))


def _groups() -> dict[str, list[dict[str, Any]]]:
    """Return the published runs by the recipe and the share of its epochs."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for key, run in read_json("fusion-settings").items():
        scale = re.search(r"epochs x ([\d.]+)", key)
        is_short = scale is not None and scale[1] == "0.1"
        groups.setdefault(f"`{key.split(':')[0]}`" + (", a tenth of the epochs" if is_short else ""), []).append(run)
    return groups


def _machines() -> str:
    runs = read_json("fusion-settings").values()
    return " and ".join(dict.fromkeys(describe_machine(run["device"], run["versions"]) for run in runs))


def _mean(values: Any) -> str:
    listed = list(values)
    return f"{sum(listed) / len(listed):.1f}" if listed else ""


def _statistics(learner: cps.Learner, selector: cps.Selector) -> Sequence[dict[str, torch.Tensor]]:
    """Return the statistics of a part of the fusion, which keeps them under a prefix."""
    kept = learner.network.statistics("Fusion")
    prefix = {"SharedSpace": "shared ", "Cascade": "cascade "}.get(selector.name, "")
    return [
        {name.removeprefix(prefix): value for name, value in each.items() if name.startswith(prefix)} for each in kept
    ]


def _accuracy(learner: cps.Learner, selector: cps.Selector, test: EvaluationOutputs) -> float:
    return percent(is_class_found(selector, _statistics(learner, selector), test))


def _subnetworks(learner: cps.Learner, selector: cps.Fusion, test: EvaluationOutputs) -> float:
    """Return how many subnetworks run for an image on average."""
    groups = torch.arange(len(test.task), device=test.task.device)
    needed = selector.needed(test.evidence(), learner.network.statistics("Fusion"), groups)
    assert needed is not None, "a fusion without the cascade needs some subnetworks only"
    return round(float(needed.sum(dim=1).double().mean()), 2)


if __name__ == "__main__":
    main()
