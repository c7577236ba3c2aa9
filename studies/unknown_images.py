"""`python -m studies.unknown_images RECIPE:ORDER... --out FILE`: how well unknown images (open set) are rejected.

The first tasks of a run are learned, half of them or one more, and the test images of the others are unknown. The
logit alone is compared with the rule of the default selector, which adds the distance in the shared space. With
pretrained weights (`cub200`) the tasks are learned without training, from the features that `studies.closed_forms` has
computed in `--cache`. A recipe with augmentation holds out a tenth of the training images, for the thresholds. Models
that are in `--models` are not learned again.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import cps
from cps.data.tasks import split_by_class
from cps.evaluation.evaluator import concatenate_tasks
from cps.evaluation.metrics import auroc, false_positive_rate
from cps.experiments.recipes import RECIPES, Recipe
from cps.network.outputs import Evidence
from cps.runtime.environment import describe_device, versions
from cps.selection.predict import select
from cps.selection.rejection import STEPS, rejection_score
from studies.closed_forms import CUB, cached_arrays
from studies.measurement import percent
from studies.published import describe_machine, markdown, read_json, write_compact

REJECT = (0.01, 0.05, 0.1, 0.2)
LABELS = {"digits": "digits", "cub200": "CUB-200, frozen ResNet-18", "cifar100-10": "CIFAR-100, 10 tasks"}


def main() -> None:
    """Measure the given runs; those that are already in the file are not repeated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", help="RECIPE:ORDER; the order is a seed")
    parser.add_argument("--data", type=Path, default=None, help="folder of the data set")
    parser.add_argument("--cache", type=Path, default=None, help="folder of the features of pretrained networks")
    parser.add_argument("--models", type=Path, default=Path("runs/unknown-images"), help="folder of the models")
    parser.add_argument("--tasks", type=int, default=None, help="number of tasks to learn")
    parser.add_argument("--epochs-scale", type=float, default=1.0, help="factor for the number of epochs")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    done = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {}
    for run in arguments.runs:
        key = f"{run}, epochs x {arguments.epochs_scale:g}"
        if key not in done:
            name, order = run.split(":")
            recipe = RECIPES[name]().with_scaled_epochs(arguments.epochs_scale)
            done[key] = _measure(arguments, recipe, int(order), arguments.models / f"{key}.cps")
            write_compact(arguments.out, done)
            print(key, done[key], flush=True)


def measure_rejection(
    learner: cps.Learner, selector: cps.Selector, evidence: Evidence, is_known: Tensor, rule: cps.Selector | None = None
) -> dict[str, Any]:
    """Measure how the subnetworks that gave the evidence reject images they have not learned (`is_known` is False).

    `selector` selects the tasks, and its rule, or that of `rule`, rejects.
    """
    network, groups = learner.network, torch.arange(len(is_known), device=is_known.device)
    tasks = select(selector, evidence, network.statistics(selector.name)[: len(evidence)], groups).tasks
    scores, is_known = rejection_score(network, evidence, tasks, rule or selector), is_known.cpu()
    return summarize(scores[is_known], scores[~is_known])


def summarize(known: Tensor, unknown: Tensor) -> dict[str, Any]:
    """Return how well the rejection scores of known and unknown images differ, and how many are rejected."""
    rejected = {str(share): [percent(part < share * STEPS) for part in (known, unknown)] for share in REJECT}
    print("AUROC", auroc(known, unknown), "rejected", rejected, flush=True)
    return {
        "AUROC": auroc(known, unknown),
        "FPR95": false_positive_rate(known, unknown, 0.95),
        "rejected (known, strangers)": rejected,
    }


def comparison_table() -> str:
    """Return the table of the logit, the distance and both."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for key, run in read_json("unknown-images").items():
        label = LABELS[key.split(":")[0]] + (", a tenth of the epochs" if key.endswith("x 0.1") else "")
        groups.setdefault(label, []).append(run)
    rows = []
    for label, runs in groups.items():
        aurocs = [
            _mean([run["logit"]["AUROC"] for run in runs]),
            _mean([run["distance"] for run in runs]),
            _mean([run["both"]["AUROC"] for run in runs]),
        ]
        rejected = [
            f"{statistics.fmean(run[rule]['rejected (known, strangers)']['0.05'][index] for run in runs):.1f}"
            for rule in ("logit", "both")
            for index in (0, 1)
        ]
        learned = f"{runs[0]['learned']} of {runs[0]['tasks']} tasks"
        rows.append([label, learned, *aurocs, *rejected, str(len(runs))])
    head = ["data", "learned", "AUROC: logit", "distance alone (closed form)", "default rule"]
    head += [f"{which} rejected at 0.05: {rule}" for rule in ("logit", "default") for which in ("known", "unknown")]
    first = next(iter(groups.values()))[0]
    note = "Test images, rejected ones in %; mean and standard deviation over class orders. The tasks are selected by "
    note += f"`Fusion` everywhere. {describe_machine(first['device'], first['versions'])}."
    return markdown([*head, "orders"], rows, note)


def _measure(arguments: argparse.Namespace, recipe: Recipe, order: int, model: Path) -> dict[str, Any]:
    """Learn the first tasks of a run and measure how the images of the others are rejected."""
    is_frozen = recipe.pretrained is not None
    tasks = _cached_tasks(recipe, order, arguments) if is_frozen else _tasks(recipe, order, arguments)
    space = cps.Pretrained() if is_frozen else None
    fusion = cps.Fusion(cps.SharedSpace(space))
    settings = {**recipe.learner_settings(), "seed": order, "selectors": (fusion, cps.MaxOutput())}
    settings |= {"normalize": None, "augment": None} if is_frozen else {}
    fabric = cps.make_fabric(accelerator="cpu")
    backbone = _identity(tasks[0]) if is_frozen else recipe.make_backbone(order)
    if model.exists():
        learner = cps.load(model, backbone, **settings, fabric=fabric)
    else:
        learner = cps.Learner(backbone, **settings, fabric=fabric)
    wanted = arguments.tasks or (len(tasks) + 1) // 2
    model.parent.mkdir(parents=True, exist_ok=True)
    for task in tasks[len(learner.classes) : wanted]:
        if is_frozen:
            learner.learn_frozen(task)
        else:
            learner.learn(task)
        learner.save(model)
        print(model.name, len(learner.classes), "tasks", flush=True)
    evidence, is_known = _run(learner, tasks)
    distances = fusion.relative_distances(evidence, learner.network.statistics(fusion.name))
    assert distances is not None, "there are between 2 and 1,000 classes"
    return {
        "learned": len(learner.classes),
        "tasks": len(tasks),
        "known images": int(is_known.sum()),
        "unknown images": int((~is_known).sum()),
        "logit": measure_rejection(learner, fusion, evidence, is_known, cps.MaxOutput()),
        "distance": auroc(distances[is_known], distances[~is_known]),
        "both": measure_rejection(learner, fusion, evidence, is_known),
        "device": describe_device(fabric),
        "versions": versions(),
    }


def _tasks(recipe: Recipe, order: int, arguments: argparse.Namespace) -> list[cps.Task]:
    train, test = recipe.read(arguments.data)
    validation = 0.0 if recipe.augment is None else 0.1
    return list(split_by_class(train, test, sizes=recipe.sizes, order=order, validation=validation, seed=order))


def _cached_tasks(recipe: Recipe, order: int, arguments: argparse.Namespace) -> list[cps.Task]:
    """Return the tasks of a run, with cached features in the space `Pretrained` instead of images."""
    assert arguments.cache is not None, "the features of pretrained networks are read from --cache"
    train, test = (
        (torch.from_numpy(np.sign(features) * features**2), labels)  # the space takes the root again
        for features, labels in cached_arrays(CUB, arguments.data, arguments.cache)
    )
    return list(split_by_class(train, test, sizes=recipe.sizes, order=order))


def _identity(task: cps.Task) -> nn.Module:
    """Return a backbone whose features are its inputs."""
    images, _ = task.train  # pyright: ignore[reportGeneralTypeIssues, reportAssignmentType]
    backbone = nn.Linear(images.shape[1], images.shape[1], bias=False)
    backbone.weight.data = torch.eye(images.shape[1])
    return backbone


def _run(learner: cps.Learner, tasks: list[cps.Task]) -> tuple[Evidence, Tensor]:
    """Return the evidence for the test images of all tasks, and whether they are of learned tasks."""
    parts: list[Evidence] = []
    of_parts: list[bool] = []
    for index, task in enumerate(tasks):
        images = task.test[0] if isinstance(task.test, tuple) else torch.stack([image for image, _ in task.test])
        evidence = learner.evidence(images)
        evidence.compute()
        parts.append(evidence)
        of_parts.append(index < len(learner.classes))
    outputs, task_of_image = concatenate_tasks([list(part) for part in parts])
    evidence = Evidence.of(outputs, lambda space: torch.cat([part.features(space) for part in parts]))
    return evidence, torch.tensor(of_parts)[task_of_image.cpu()]


def _mean(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}"


if __name__ == "__main__":
    main()
