"""`python -m studies.ablation VARIANT... --data DIR --out FILE`: the recipe for single images without its parts.

`first+PART+PART` adds parts to the recipe as it was before the search for a better one. `single` is the present recipe,
and `no-contrast`, `no-budget`, `weak`, `one-rotation`, `upright` and `one-round` each take a part away. With
`--validation`, a share of the training images is held out, and results are measured on these instead of the test images
(unless `--test` is given); choices were made this way. The held-out images also calibrate rejection. With `--tasks`,
the images of the tasks that are not learned serve as unknown images.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

import cps
from cps.data.examples import as_examples
from cps.data.tasks import split_by_class
from cps.evaluation.evaluator import concatenate_tasks
from cps.evaluation.metrics import auroc
from cps.experiments.recipes import RECIPES, SINGLE_IMAGE_CASCADE, Recipe
from cps.network.cost import measure_costs
from cps.network.outputs import Evidence
from cps.network.subnetwork import local_labels
from cps.runtime.environment import describe_device, versions
from cps.selection.gather import gather_evidence
from cps.training.settings import scale_epochs
from studies.published import closed_form_run, describe_machine, markdown, read_json, write_compact
from studies.unknown_images import measure_rejection

Change = Callable[[Recipe], Recipe]
Run = dict[str, Any]
WEAK_AUGMENTATION = cps.Chain((cps.PadCrop(4), cps.Flip()))
ONE_ROTATION = cps.Rotations(flips=True)


def _with(**changes: Any) -> Change:
    return lambda recipe: replace(recipe, **changes)


def _with_training(**changes: Any) -> Change:
    """Change training and retraining in the same way."""
    return lambda recipe: replace(
        recipe, train=replace(recipe.train, **changes), retrain=replace(recipe.retrain, **changes)
    )


def _first(recipe: Recipe) -> Recipe:
    """Return the recipe as it was before the search for a better one."""
    train = cps.Training(80, cps.Adam(3e-3, weight_decay=5e-4), cps.Cosine(), batch_size=128)
    return replace(
        recipe,
        train=train,
        retrain=replace(train, epochs=30),
        rotations=ONE_ROTATION,
        augment=WEAK_AUGMENTATION,
        capacity=None,
    )


VARIANTS: dict[str, Change] = {
    "single": lambda recipe: recipe,
    "first": _first,
    "no-contrast": _with_training(loss=cps.CrossEntropy()),
    "no-budget": _with(capacity=None),
    "weak": _with(augment=WEAK_AUGMENTATION),
    "one-rotation": _with(rotations=ONE_ROTATION),
    "upright": _with(rotations=cps.Upright(flips=True)),
    "no-flips": _with(rotations=cps.Rotations()),
    "all-rotations": _with(rotations=cps.Rotations(at_once=True, flips=True)),
    "one-round": _with(rounds=1),
    "alpha-0.7": _with(pruner=cps.NNrelief(alpha=0.7)),
    "alpha-0.8": _with(pruner=cps.NNrelief(alpha=0.8)),
    "alpha-0.85": _with(pruner=cps.NNrelief(alpha=0.85)),
    "alpha-0.95": _with(pruner=cps.NNrelief(alpha=0.95)),
    "alpha-0.98": _with(pruner=cps.NNrelief(alpha=0.98)),
    "budget": _with(capacity=cps.Capacity(budget=0.01)),
    "third": _with(backbone=lambda: cps.resnet18(3, (24, 48, 88, 176))),
    "decay-0": _with_training(optimizer=cps.Adam(3e-3, weight_decay=0.0)),
    "decay-5e-5": _with_training(optimizer=cps.Adam(3e-3, weight_decay=5e-5)),
    "decay-1e-4": _with_training(optimizer=cps.Adam(3e-3, weight_decay=1e-4)),
    "decay-2e-4": _with_training(optimizer=cps.Adam(3e-3, weight_decay=2e-4)),
    "rate-1e-3": _with_training(optimizer=cps.Adam(1e-3, weight_decay=5e-4)),
    "sgd": _with_training(optimizer=cps.SGD(0.1, weight_decay=5e-4)),
    "sgd-light": _with_training(optimizer=cps.SGD(0.05, weight_decay=1e-3)),
    "adamw": _with_training(optimizer=cps.AdamW(2e-3, weight_decay=5e-2)),
    "adamw-heavy": _with_training(optimizer=cps.AdamW(2e-3, weight_decay=0.2)),
    "contrast": _with_training(loss=cps.Contrastive()),
    "contrast-soft": _with_training(loss=cps.Contrastive(weight=0.5, temperature=0.3)),
    "twice": lambda recipe: recipe.with_scaled_epochs(2.0),
    "colour": _with(augment=cps.Chain((cps.PadCrop(4), cps.Flip(), cps.Colour()))),
    "crop": _with(augment=cps.Chain((cps.ResizedCrop((0.3, 1.0)), cps.Flip()))),
    "crop-colour": _with(augment=cps.Chain((cps.ResizedCrop((0.3, 1.0)), cps.Flip(), cps.Colour()))),
}
RENAMED_VARIANTS = {"one-turn": "one-rotation", "turns-at-once": "all-rotations"}  # in published files -> since

LEFT_OUT = {
    "single": "nothing",
    "upright": "rotations (upright images only)",
    "one-rotation": "all rotations at once (one random rotation)",
    "weak": "strong augmentation (crops by 4 pixels and flips)",
    "no-contrast": "the contrastive loss",
    "one-round": "two of the three pruning rounds",
    "no-budget": "the budget",
}
MEASURES: dict[str, Callable[[Run], float]] = {
    "one image": lambda run: run["class_il"]["cascade"]["1"],
    "one image, largest output": lambda run: run["class_il"]["largest output"]["1"],
    "task found": lambda run: run["selection"]["cascade"],
    "task known": lambda run: run["task_il"],
    "AUROC of unknown images": lambda run: 100 * run["strangers"]["AUROC"],
}
COSTS: dict[str, tuple[str, Callable[[Run, Run], float | None]]] = {  # format, and value beside the whole recipe
    "weights taken": ("{:.0f}", lambda run, _: run["taken"]),
    "training time": ("{:.2f} x", lambda run, whole: run["minutes"] / whole["minutes"] if "minutes" in run else None),
    "operations per image": ("{:.0f} G", lambda run, _: run["operations"] / 1e9),
}
PARTS = {  # labels of the table of choices
    "": "first settings (Adam, weight decay 5e-4)",
    "again": "the same, repeated",
    "adamw": "AdamW",
    "sgd": "SGD",
    "sgd-light": "SGD, smaller rate, larger weight decay",
    "decay-1e-4": "weight decay 1e-4",
    "alpha-0.95": "alpha 0.95",
    "crop": "larger crops",
    "crop-colour": "larger crops, colour",
    "all-rotations": "all rotations at once",
    "contrast": "contrastive loss",
}


def selectors_around(cascade: cps.Cascade) -> dict[str, cps.Selector]:
    """Return the largest output, a cascade, and variants of the cascade with one setting changed."""
    variants = {
        "logit_weight 0": replace(cascade, logit_weight=0.0),
        "half the logit_weight": replace(cascade, logit_weight=cascade.logit_weight / 2),
        "twice the logit_weight": replace(cascade, logit_weight=2 * cascade.logit_weight),
        "half the temperature": replace(cascade, temperature=cascade.temperature / 2),
        "twice the temperature": replace(cascade, temperature=2 * cascade.temperature),
        "covariance_pooling 1": replace(cascade, covariance_pooling=1.0),
        "mean_contraction 1": replace(cascade, mean_contraction=1.0),
        "a fifth of the shrinkage": replace(cascade, shrinkage=cascade.shrinkage / 5),
        "five times the shrinkage": replace(cascade, shrinkage=5 * cascade.shrinkage),
    }
    selectors: dict[str, cps.Selector] = {"largest output": cps.MaxOutput(), "cascade": cascade}
    return selectors | {f"cascade, {name}": variant for name, variant in variants.items() if variant != cascade}


def main() -> None:
    """Run the given variants; those that are already in the file are not repeated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variants", nargs="+", help=f"parts joined by +: {', '.join(VARIANTS)}")
    parser.add_argument("--recipe", default="cifar100-10-single")
    parser.add_argument("--data", type=Path, default=None, help="folder of the data set")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--order", type=int, default=9999, help="seed of the class order")
    parser.add_argument("--validation", type=float, default=0.0, help="share of the training images to hold out")
    parser.add_argument("--test", action="store_true", help="measure on the test images even with --validation")
    parser.add_argument("--tasks", type=int, default=None, help="number of tasks to learn")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights and of training")
    parser.add_argument("--epochs-scale", type=float, default=1.0, help="factor for the number of epochs")
    arguments = parser.parse_args()
    done = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {}
    for variant in arguments.variants:
        how = f"order {arguments.order}, epochs x {arguments.epochs_scale:g}, validation {arguments.validation:g}"
        how += ", on test images" if arguments.test else ""
        how += f", seed {arguments.seed}" if arguments.seed else ""
        key = f"{arguments.recipe}, {how}, tasks {arguments.tasks or 'all'}: {variant}"
        recipe = _apply(variant, RECIPES[arguments.recipe]())
        if key in done:
            continue
        done[key] = _measure(arguments, recipe)
        write_compact(arguments.out, done)
        print(key, json.dumps(done[key]), flush=True)


def ablation_table() -> str:
    """Return the table of what is lost without each part of the training, compared in the same class orders."""
    runs = _published_parts()
    rows = []
    for variant, label in LEFT_OUT.items():
        pairs = [(run, runs["single"][order]) for order, run in runs[variant].items()]
        values = [_format_difference([(of(run), of(whole)) for run, whole in pairs]) for of in MEASURES.values()]
        costs = [_format_mean(form, [of(*pair) for pair in pairs]) for form, of in COSTS.values()]
        rows.append([label, *values, *costs, " ".join(map(str, runs[variant]))])
    rows.append(_closed_form_row(list(runs["single"])))
    run = next(iter(runs["single"].values()))
    note = (
        "In %, test images, the first five of ten tasks of `cifar100-10-single`. In brackets: the difference from the "
        "whole recipe in the same orders, with its standard deviation. Two runs always shared the GPU, so training "
        "times are ratios (of orders 1993 and 1605; during order 2022 the machine did other work, too). Each AUROC was "
        "recorded to a whole percent. "
    )
    head = ["left out", *MEASURES, *COSTS, "orders"]
    return markdown(head, rows, f"{note}{describe_machine(run['device'], run['versions'])}.")


def choice_table() -> str:
    """Return the table of what each variant of training gave after two tasks, on images held out of training."""
    runs = read_json("ablation-choice")
    rows = []
    for key, run in runs.items():
        parts = key.split(": ")[1].removeprefix("first").strip().removeprefix("+").split("+")
        label = ", ".join(PARTS[RENAMED_VARIANTS.get(part, part)] for part in parts)
        values = [run["task_il"], statistics.fmean(run["auroc"]), run["class_il"]["largest output"]["1"], run["taken"]]
        rows.append([label, *(f"{value:.1f}" for value in values)])
    closed = read_json("closed-form-rows")["training"]
    rows.append(["closed form", f"{closed['task known']:.1f}", "", f"{closed['one image']:.1f}", ""])
    head = ["training", "task known", "AUROC", "one image, largest output", "weights taken"]
    first = next(iter(runs.values()))
    note = "All in %; two of ten tasks, 500 images of each; the AUROC is against the images of all other tasks; "
    return markdown(head, rows, f"{note}{describe_machine(first['device'], first['versions'])}.")


def _closed_form_row(orders: list[int]) -> list[str]:
    """Return the row of the closed form after the first five of ten tasks."""
    found = {"one image": 0.0, "task found": 0.0, "task known": 0.0, "AUROC of unknown images": 0.0}
    for order in orders:
        run = closed_form_run(f"cifar100-10-{order}")
        assert run is not None, f"the closed form of order {order} was not measured"
        single, known = run["metrics"]["class_il"]["1"], run["metrics"]["task_il"]
        found["one image"] += statistics.fmean(single["accuracy"][4][:5]) / len(orders)
        found["task found"] += statistics.fmean(single["selection"][4][:5]) / len(orders)
        found["task known"] += statistics.fmean(known["accuracy"][4][:5]) / len(orders)
        unknown = read_json("closed-form-rows")["unknown"][str(order)]
        found["AUROC of unknown images"] += 100 * unknown["AUROC"] / len(orders)
    cells = [f"{found[name]:.1f}" if name in found else "" for name in MEASURES]
    return ["everything (closed form)", *cells, *("" for _ in COSTS), " ".join(map(str, orders))]


def _apply(variant: str, recipe: Recipe) -> Recipe:
    for part in variant.split("+"):
        recipe = VARIANTS[part](recipe)
    return recipe


def _measure(arguments: argparse.Namespace, recipe: Recipe) -> Run:
    """Learn the tasks with a recipe and measure it."""
    settings = {**recipe.learner_settings(), "selectors": (SINGLE_IMAGE_CASCADE, cps.MaxOutput())}
    for phase in ("train", "retrain"):
        settings[phase] = scale_epochs(settings[phase], arguments.epochs_scale)
    fabric = cps.make_fabric()
    learner = cps.Learner(recipe.make_backbone(arguments.seed), **settings, seed=arguments.seed, fabric=fabric)
    all_tasks = _make_tasks(recipe, arguments)
    tasks = all_tasks[: arguments.tasks]
    start = time.monotonic()
    for task in tasks:
        learner.learn(task)
    minutes = (time.monotonic() - start) / 60
    evaluation = cps.evaluate(learner, tasks, selectors=selectors_around(SINGLE_IMAGE_CASCADE))
    evidence, task_of_image = _run_all_tasks(learner, all_tasks)
    is_known = task_of_image < len(tasks)
    has_unknown = not bool(is_known.all())
    return {
        "auroc": _auroc(evidence, task_of_image),
        "strangers": measure_rejection(learner, SINGLE_IMAGE_CASCADE, evidence, is_known) if has_unknown else None,
        "task_il": evaluation.task_il.ACC,
        "class_il": {
            name: {str(size): metrics.ACC for size, metrics in by_size.items()}
            for name, by_size in evaluation.class_il.items()
        },
        "selection": {
            name: float(by_size[1].selection[-1].mean())
            for name, by_size in evaluation.class_il.items()
            if by_size[1].selection is not None
        },
        "minutes": minutes,
        "operations": sum(cost.operations for cost in measure_costs(learner.network)[1]),
        "taken": 100 * (1 - learner.network.free_share()),
        "measured on": "images held out of training" if _is_on_held_out(arguments) else "test images",
        "device": describe_device(fabric),
        "versions": versions(),
    }


def _make_tasks(recipe: Recipe, arguments: argparse.Namespace) -> list[cps.Task]:
    train, test = recipe.read(arguments.data)
    scenario = split_by_class(train, test, sizes=recipe.sizes, order=arguments.order, validation=arguments.validation)
    return [replace(task, test=task.val) if _is_on_held_out(arguments) else task for task in scenario]


def _is_on_held_out(arguments: argparse.Namespace) -> bool:
    """Return True if results are measured on held-out images instead of test images."""
    return arguments.validation > 0 and not arguments.test


def _run_all_tasks(learner: cps.Learner, tasks: list[cps.Task]) -> tuple[Evidence, Tensor]:
    """Return the evidence for the test images of all tasks, learned or not, and the task of each image."""
    parts = []
    for task in tasks:
        examples = as_examples(task.test, partial(local_labels, task.classes))
        parts.append(list(gather_evidence(learner.network, examples, learner.fabric)))
    outputs, task_of_image = concatenate_tasks(parts)
    return Evidence.of(outputs), task_of_image


def _auroc(evidence: Evidence, tasks: Tensor) -> list[float]:
    """Return how well the largest output of each subnetwork separates the images of its task from all others."""
    largest = [outputs.logits.amax(dim=1).cpu().numpy() for outputs in evidence]
    own = [(tasks == task).cpu().numpy() for task in range(len(evidence))]
    return [100 * auroc(values[mine], values[~mine]) for values, mine in zip(largest, own, strict=True)]


def _published_parts() -> dict[str, dict[int, Run]]:
    """Return the published runs with and without parts of the training, by variant and class order."""
    runs: dict[str, dict[int, Run]] = {}
    for key, run in read_json("ablation-parts").items():
        how, variant = key.split(": ")
        order = int(how.split("order ")[1].split(",")[0])
        runs.setdefault(RENAMED_VARIANTS.get(variant, variant), {})[order] = run
    return runs


def _format_difference(pairs: list[tuple[float, float]]) -> str:
    """Return the mean value, and its difference from the whole recipe with the standard deviation."""
    mean = f"{statistics.fmean(value for value, _ in pairs):.1f}"
    differences = [value - whole for value, whole in pairs]
    if not any(differences):
        return mean
    return f"{mean} ({statistics.fmean(differences):+.1f} ± {statistics.stdev(differences):.1f})"


def _format_mean(form: str, values: list[float | None]) -> str:
    """Return the mean of the values that were measured, or nothing."""
    measured = [value for value in values if value is not None]
    return form.format(statistics.fmean(measured)) if measured else ""


if __name__ == "__main__":
    main()
