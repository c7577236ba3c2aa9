"""`python -m benchmarks.ablation --data DIR --out FILE VARIANT...`: parts of the recipe for single images, on and off.

`first+PART+PART` adds parts to the recipe as it was when the search for a better one began; `single` is the recipe as
it is, and `no-contrast`, `no-budget`, `weak`, `one-turn`, `upright` or `one-round` take a part away. With
`--validation`, a share of the training images is held out and measured on instead of the test images: choices are made
with that, published figures without or with `--test`. How familiar images look is then told from those, too.
Where some tasks are left out (`--tasks`), their images are strangers.
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
from benchmarks.paper import compact
from benchmarks.strangers import told_apart
from cps.data.examples import as_examples
from cps.data.tasks import Scenario, split_by_class
from cps.evaluation.evaluator import in_turn
from cps.evaluation.metrics import auroc
from cps.experiments.recipes import RECIPES, SURE, Recipe
from cps.network.cost import describe_costs
from cps.network.outputs import Evidence
from cps.network.subnetwork import local_labels
from cps.runtime.environment import describe_device, versions
from cps.selection.gather import gather_evidence
from cps.storage.container import write_text
from cps.training.settings import scaled

Change = Callable[[Recipe], Recipe]
WEAK = cps.Chain((cps.PadCrop(4), cps.Flip()))
ONE_TURN = cps.Rotations(flips=True)


def _with(**changes: Any) -> Change:
    return lambda recipe: replace(recipe, **changes)


def _training(**changes: Any) -> Change:
    """Change all phases alike."""
    return lambda recipe: replace(
        recipe, train=replace(recipe.train, **changes), retrain=replace(recipe.retrain, **changes)
    )


def _first(recipe: Recipe) -> Recipe:
    """Return the recipe as it was when the search for a better one began."""
    train = cps.Training(80, cps.Adam(3e-3, weight_decay=5e-4), cps.Cosine(), batch_size=128)
    return replace(
        recipe,
        train=train,
        retrain=replace(train, epochs=30),
        rotations=ONE_TURN,
        augment=WEAK,
        capacity=None,
    )


VARIANTS: dict[str, Change] = {
    "single": lambda recipe: recipe,
    "first": _first,
    "no-contrast": _training(loss=cps.CrossEntropy()),
    "no-budget": _with(capacity=None),
    "weak": _with(augment=WEAK),
    "one-turn": _with(rotations=ONE_TURN),
    "upright": _with(rotations=cps.Upright(flips=True)),
    "no-mirrors": _with(rotations=cps.Rotations()),
    "turns-at-once": _with(rotations=cps.Rotations(at_once=True, flips=True)),
    "one-round": _with(rounds=1),
    "alpha-0.7": _with(pruner=cps.NNrelief(alpha=0.7)),
    "alpha-0.8": _with(pruner=cps.NNrelief(alpha=0.8)),
    "alpha-0.85": _with(pruner=cps.NNrelief(alpha=0.85)),
    "alpha-0.95": _with(pruner=cps.NNrelief(alpha=0.95)),
    "alpha-0.98": _with(pruner=cps.NNrelief(alpha=0.98)),
    "budget": _with(capacity=cps.Capacity(budget=0.01)),
    "third": _with(backbone=lambda: cps.resnet18(3, (24, 48, 88, 176))),
    "decay-0": _training(optimizer=cps.Adam(3e-3, weight_decay=0.0)),
    "decay-5e-5": _training(optimizer=cps.Adam(3e-3, weight_decay=5e-5)),
    "decay-1e-4": _training(optimizer=cps.Adam(3e-3, weight_decay=1e-4)),
    "decay-2e-4": _training(optimizer=cps.Adam(3e-3, weight_decay=2e-4)),
    "rate-1e-3": _training(optimizer=cps.Adam(1e-3, weight_decay=5e-4)),
    "sgd": _training(optimizer=cps.SGD(0.1, weight_decay=5e-4)),
    "sgd-light": _training(optimizer=cps.SGD(0.05, weight_decay=1e-3)),
    "adamw": _training(optimizer=cps.AdamW(2e-3, weight_decay=5e-2)),
    "adamw-heavy": _training(optimizer=cps.AdamW(2e-3, weight_decay=0.2)),
    "contrast": _training(loss=cps.Contrastive()),
    "contrast-soft": _training(loss=cps.Contrastive(weight=0.5, temperature=0.3)),
    "twice": lambda recipe: recipe.scaled(2.0),
    "colour": _with(augment=cps.Chain((cps.PadCrop(4), cps.Flip(), cps.Colour()))),
    "crop": _with(augment=cps.Chain((cps.ResizedCrop((0.3, 1.0)), cps.Flip()))),
    "crop-colour": _with(augment=cps.Chain((cps.ResizedCrop((0.3, 1.0)), cps.Flip(), cps.Colour()))),
}


def selectors_around(cascade: cps.Cascade) -> dict[str, cps.Selector]:
    """Return the largest output, a cascade, and the cascade with one of its parts off or weighed otherwise."""
    others = {
        "without own outputs": replace(cascade, logit_weight=0.0),
        "own outputs half as much": replace(cascade, logit_weight=cascade.logit_weight / 2),
        "own outputs twice as much": replace(cascade, logit_weight=2 * cascade.logit_weight),
        "half the temperature": replace(cascade, temperature=cascade.temperature / 2),
        "twice the temperature": replace(cascade, temperature=2 * cascade.temperature),
        "spreads alike": replace(cascade, covariance_pooling=1.0),
        "classes as far apart as in training": replace(cascade, mean_contraction=1.0),
        "a fifth of the shrinkage": replace(cascade, shrinkage=cascade.shrinkage / 5),
        "five times the shrinkage": replace(cascade, shrinkage=5 * cascade.shrinkage),
    }
    known: dict[str, cps.Selector] = {"largest output": cps.MaxOutput(), "cascade": cascade}
    return known | {f"cascade, {name}": other for name, other in others.items() if other != cascade}


def main() -> None:
    """Run the variants that were asked for; what is in the file already is not run again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variants", nargs="+", help=f"with a + between parts: {', '.join(VARIANTS)}")
    parser.add_argument("--recipe", default="cifar100-10-single")
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--order", type=int, default=9999)
    parser.add_argument("--validation", type=float, default=0.0)
    parser.add_argument("--test", action="store_true", help="measure on the test images all the same")
    parser.add_argument("--tasks", type=int, default=None, help="only the first so many tasks")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and of training")
    parser.add_argument("--epochs-scale", type=float, default=1.0)
    arguments = parser.parse_args()
    done = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for variant in arguments.variants:
        how = f"order {arguments.order}, epochs x {arguments.epochs_scale:g}, validation {arguments.validation:g}"
        how += ", on test images" if arguments.test else ""
        how += f", seed {arguments.seed}" if arguments.seed else ""
        key = f"{arguments.recipe}, {how}, tasks {arguments.tasks or 'all'}: {variant}"
        recipe = _changed(RECIPES[arguments.recipe](), variant)
        if key in done:
            continue
        done[key] = _measure(arguments, recipe)
        write_text(arguments.out, compact(done))
        print(key, json.dumps(done[key]), flush=True)


def _changed(recipe: Recipe, variant: str) -> Recipe:
    for part in variant.split("+"):
        recipe = VARIANTS[part](recipe)
    return recipe


def _measure(arguments: argparse.Namespace, recipe: Recipe) -> dict[str, Any]:
    settings = {**recipe.learner_settings(), "selectors": (SURE, cps.MaxOutput())}
    for phase in ("train", "retrain"):
        settings[phase] = scaled(settings[phase], arguments.epochs_scale)
    fabric = cps.make_fabric()
    learner = cps.Learner(recipe.drawn(arguments.seed), **settings, seed=arguments.seed, fabric=fabric)
    every = _tasks(recipe, arguments)
    tasks = every[: arguments.tasks]
    began = time.monotonic()
    for task in tasks:
        learner.learn(task)
    minutes = (time.monotonic() - began) / 60
    found: dict[str, Any] = cps.evaluate(learner, tasks, selectors=selectors_around(SURE))
    evidence, of_task = _look_at_all(learner, every)
    is_known = of_task < len(tasks)
    return {
        "auroc": _auroc(evidence, of_task),
        "strangers": None if bool(is_known.all()) else told_apart(learner, SURE, evidence, is_known),
        "task_il": found["task_il"]["ACC"],
        "class_il": {
            name: {size: entry["ACC"] for size, entry in by_size.items()} for name, by_size in found["class_il"].items()
        },
        "selection": {
            name: statistics.fmean(by_size["1"]["selection"][-1]) for name, by_size in found["class_il"].items()
        },
        "minutes": minutes,
        "operations": sum(cost["operations"] for cost in describe_costs(learner.network)[1]),
        "taken": 100 * (1 - learner.network.free_share()),
        "measured on": "images held out of training" if _is_on_held_out(arguments) else "test images",
        "device": describe_device(fabric),
        "versions": versions(),
    }


def _tasks(recipe: Recipe, arguments: argparse.Namespace) -> list[cps.Task]:
    train, test = recipe.read(arguments.data)
    scenario: Scenario = split_by_class(
        train, test, sizes=recipe.sizes, order=arguments.order, validation=arguments.validation
    )
    return [replace(task, test=task.val) if _is_on_held_out(arguments) else task for task in scenario]


def _is_on_held_out(arguments: argparse.Namespace) -> bool:
    """Say whether to measure on held-out images."""
    return arguments.validation > 0 and not arguments.test


def _look_at_all(learner: cps.Learner, every: list[cps.Task]) -> tuple[Evidence, Tensor]:
    """Return what the subnetworks say about the test images of all tasks, learned or not, and the task of each."""
    parts = [
        list(
            gather_evidence(
                learner.network, as_examples(task.test, partial(local_labels, task.classes)), learner.fabric
            )
        )
        for task in every
    ]
    said, tasks = in_turn(parts)
    return Evidence(lambda asked: [said[task] for task in asked], len(said)), tasks


def _auroc(evidence: Evidence, tasks: Tensor) -> list[float]:
    """Return how well the largest output of each subnetwork tells the images of its task from all others."""
    largest = [outputs.logits.amax(dim=1).cpu().numpy() for outputs in evidence]
    own = [(tasks == task).cpu().numpy() for task in range(len(evidence))]
    return [100 * auroc(values[mine], values[~mine]) for values, mine in zip(largest, own, strict=True)]


if __name__ == "__main__":
    main()
