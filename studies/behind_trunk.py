"""`python -m studies.behind_trunk --cub DIR --out FILE`: what subnetworks behind a frozen trunk add to a closed form.

Bird photos (CUB-200) in tasks of equally many classes, on a pretrained backbone. A part of the training images can be
held out, with which the weights of the fusion are chosen; test images choose nothing. The result is written after every
task, and running the command again resumes.
"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cps
from cps.app.autoconfig import trunk_settings
from cps.data.class_orders import class_order
from cps.data.image_folder import FolderImages
from cps.network.pretrained import load_pretrained, preprocessing_of
from cps.runtime.devices import has_fast_bfloat16
from cps.runtime.environment import describe_device, versions
from cps.selection.fusion import WEIGHTS
from studies.published import describe_machine, markdown, read_json, write_compact

FEWEST_IMAGES = 5  # of a class, from which some are held out


@dataclass(frozen=True)
class Photos:
    """Training, held-out and test images of a task, with the class of each."""

    train: tuple[Tensor, list[str]]
    held_out: tuple[Tensor, list[str]]
    test: tuple[Tensor, list[str]]


def photos_of(classes: list[str], train: FolderImages, test: FolderImages, hold_out: float) -> Photos:
    """Return the images of some classes; every tenth of a class is held out if `hold_out` is 0.1."""
    kept: list[int] = []
    held: list[int] = []
    for name in classes:
        own = [index for index, label in enumerate(train.labels) if label == name]
        number = round(hold_out * len(own)) if len(own) >= FEWEST_IMAGES else 0
        chosen = {own[round(place)] for place in torch.linspace(0, len(own) - 1, number).tolist()}
        held += sorted(chosen)
        kept += [index for index in own if index not in chosen]
    tests = [index for index, label in enumerate(test.labels) if label in set(classes)]

    def select(images: FolderImages, indices: list[int]) -> tuple[Tensor, list[str]]:
        return images.images[indices], [images.labels[index] for index in indices]

    return Photos(select(train, kept), select(train, held), select(test, tests))


def new_learner(options: argparse.Namespace) -> cps.Learner:
    """Return the learner that `cps learn --minutes` would make, but for the settings that are given."""
    pretrained = load_pretrained(cps.Architecture(options.backbone), options.weights)
    size = pretrained.preprocessing.size
    trunk = options.trunk or cps.suggest_trunk(pretrained.module, torch.zeros(2, 3, size, size))
    settings = trunk_settings(options.epochs)
    weights: dict[str, Any] = {}
    if options.fusion_weights:
        weights = dict(zip(("task_weight", "class_weight"), options.fusion_weights, strict=True))
    settings |= {"map_copies": options.copies} if options.copies else {}
    precision = "bf16-mixed" if has_fast_bfloat16() else "32-true"
    return cps.Learner(
        pretrained.module,
        architecture=pretrained.architecture,
        normalize=pretrained.preprocessing.normalize,
        trunk=trunk,
        selectors=(cps.Fusion(cps.SharedSpace(cps.Pretrained()), **weights),),
        fabric=cps.make_fabric(accelerator="cpu", precision=precision),
        on_epoch=lambda at: print(
            f"task {at.task} {at.phase_name} {at.done}/{at.total} loss {at.loss:.3f}", flush=True
        ),
        **settings,
    )


def learn(learner: cps.Learner, classes: list[str], photos: Photos, checkpoint: Path) -> dict[str, Any]:
    """Learn a task; return its cost."""
    start, cpu = time.monotonic(), time.process_time()
    held_out = photos.held_out if photos.held_out[1] else None
    subnetwork = learner.learn(cps.Task(classes, train=photos.train, val=held_out), checkpoint=checkpoint)
    return {
        "classes": classes,
        "seconds": round(time.monotonic() - start, 1),
        "CPU seconds": round(time.process_time() - cpu, 1),
        "is frozen": subnetwork.is_frozen,
        "density": round(learner.network.density(len(learner.classes) - 1), 4),
    }


@torch.no_grad()
def measure(learner: cps.Learner, photos: list[Photos], *, held_out: bool) -> dict[str, Any]:
    """Return the accuracy on single test or held-out images in %, of cps and of the closed form alone."""
    fusion = learner.config.selectors[0]
    assert isinstance(fusion, cps.Fusion)
    closed = cps.Fusion(fusion.shared, fusion.cascade, task_weight=0.0, class_weight=0.0)
    names = [name for classes in learner.classes for name in classes]
    right = dict.fromkeys(("cps", "closed form", "cps, task known", "fused, task known", "closed form, task known"), 0)
    grid = torch.zeros(len(WEIGHTS), len(WEIGHTS))
    total = 0
    statistics = learner.network.statistics(fusion.name)
    for task, own in enumerate(photos):
        images, labels = own.held_out if held_out else own.test
        for part, truth in zip(images.split(256), _split(labels, 256), strict=True):
            evidence = learner.evidence(part)
            first = sum(map(len, learner.classes[:task]))
            target = torch.tensor([names.index(name) for name in truth])
            known = slice(first, first + len(learner.classes[task]))
            fused, bare = (_scores(each, evidence, statistics) for each in (fusion, closed))
            right["cps"] += int((fused.argmax(dim=1) == target).sum())
            right["closed form"] += int((bare.argmax(dim=1) == target).sum())
            right["fused, task known"] += int((fused[:, known].argmax(dim=1) == target - first).sum())
            right["closed form, task known"] += int((bare[:, known].argmax(dim=1) == target - first).sum())
            right["cps, task known"] += int((evidence[task].logits.argmax(dim=1) == target - first).sum())
            grid += _grid(fusion, evidence, statistics, bare, target)
            total += len(truth)
    found: dict[str, Any] = {name: round(100 * number / max(total, 1), 2) for name, number in right.items()}
    found["weights"] = list(fusion.weights(statistics))
    found["by weight of task and class"] = (100 * grid / max(total, 1)).round(decimals=2).tolist()
    return {"images": total, **found}


def _scores(fusion: cps.Fusion, evidence: cps.Evidence, statistics: Any) -> Tensor:
    """Return the fused scores (N, classes) of all classes."""
    precomputed = fusion.precompute(statistics)
    scores = [fusion.score_classes(evidence, precomputed, task) for task in range(len(evidence))]
    if any(fusion.weights(statistics)):
        weight = fusion.weights(statistics)[0]
        of_task = fusion.cascade.score_images(evidence, _part(precomputed, "cascade "))
        scores = [each + weight * of_task[:, task : task + 1] for task, each in enumerate(scores)]
    return torch.cat(scores, dim=1)


def _grid(fusion: cps.Fusion, evidence: cps.Evidence, statistics: Any, bare: Tensor, target: Tensor) -> Tensor:
    """Return the number of right images for each pair of weights, of the task and of the class."""
    of_class = torch.cat([outputs.logits.log_softmax(dim=1) for outputs in evidence], dim=1)
    sizes = torch.tensor([outputs.logits.shape[1] for outputs in evidence])
    of_task = fusion.cascade.score_images(evidence, _part(fusion.precompute(statistics), "cascade "))
    of_task = of_task.repeat_interleave(sizes, dim=1)
    rows = [
        [float(((bare + a * of_task + b * of_class).argmax(dim=1) == target).sum()) for b in WEIGHTS] for a in WEIGHTS
    ]
    return torch.tensor(rows)


def _part(precomputed: Any, prefix: str) -> list[dict[str, Tensor]]:
    return [
        {name.removeprefix(prefix): value for name, value in kept.items() if name.startswith(prefix)}
        for kept in precomputed
    ]


def _split(items: list[str], size: int) -> list[list[str]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def run(options: argparse.Namespace) -> None:
    """Learn and measure, from where an earlier run of the same command stopped."""
    learner = new_learner(options)
    assert learner.architecture is not None
    expected = preprocessing_of(learner.architecture)
    train, test = (
        cps.read_folder(options.cub / part, size=expected.size, margin=expected.margin, cache=options.cache)
        for part in ("train", "test")
    )
    names = [str(name) for name in class_order(train.classes, options.order)]
    cuts = _split(names, len(names) // options.tasks)[: options.first or None]
    photos = [photos_of(classes, train, test, options.hold_out) for classes in cuts]
    model = options.out.with_suffix(".cps")
    results: dict[str, Any] = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    if model.exists():
        learner = cps.load(model, fabric=learner.fabric, on_epoch=learner.on_epoch)
    else:
        results = describe(options, learner)
    for task in range(len(learner.classes), len(cuts)):
        cost = learn(learner, cuts[task], photos[task], options.out.with_suffix(".checkpoint"))
        learner.save(model)
        options.out.with_suffix(".checkpoint").unlink(missing_ok=True)
        results["tasks"].append(cost)
        write_compact(options.out, results)
    if "test" not in results:
        results["test"] = measure(learner, photos, held_out=False)
        if options.hold_out:
            results["held out"] = measure(learner, photos, held_out=True)
        print(json.dumps(results["test"]))
        write_compact(options.out, results)


def describe(options: argparse.Namespace, learner: cps.Learner) -> dict[str, Any]:
    """Return the settings of a run and the machine it runs on."""
    return {
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in _public(options).items()},
        "settings": learner.config.encode(),
        "device": describe_device(learner.fabric),
        "versions": versions(),
        "tasks": [],
    }


def gain_table() -> str:
    """Return the table of what subnetworks behind a trunk add to the closed form on the same features."""
    run = read_json("behind-trunk")
    options, test, held_out = run["options"], run["test"], run["held out"]
    keys = {"cps": "cps", "closed form": "closed form", "cps, task known": "task known: cps"}
    keys["closed form, task known"] = "task known: closed form"
    rows = [
        [f"{of['images']:,} {images} images", *(f"{of[key]:.1f}" for key in keys)]
        for images, of in (("test", test), ("held-out", held_out))
    ]
    training = run["settings"]["train"]["epochs"], run["settings"]["retrain"]["epochs"]
    minutes = sum(task["CPU seconds"] for task in run["tasks"]) / 60
    note = f"Right in %, single images; CUB-200-2011 in {options['tasks']} tasks, order {options['order']}, "
    note += f"{options['backbone']} behind `{options['trunk']}`, {training[0]} + {training[1]} epochs, "
    note += f"{options['copies']} augmented copies, a tenth of the training images held out, which chose weights; "
    note += f"learning took {minutes:.0f} minutes of CPU time; {describe_machine(run['device'], run['versions'])}."
    return markdown(["", *keys.values()], rows, note)


def _public(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options without paths of this machine."""
    return {name: value for name, value in vars(options).items() if name not in ("cub", "out", "cache", "weights")}


def main() -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cub", type=Path, required=True, help="folder with train/ and test/")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path, help="folder for decoded images")
    parser.add_argument("--backbone", default="efficientnet-lite0")
    parser.add_argument("--weights", type=Path, help="file with pretrained weights")
    parser.add_argument("--trunk", help="the layer to split behind; default: the one that cps suggests")
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--first", type=int, default=0, help="learn only the first tasks")
    parser.add_argument("--order", type=int, default=1993)
    parser.add_argument("--hold-out", type=float, default=0.0)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--copies", type=int, default=0)
    parser.add_argument("--fusion-weights", type=float, nargs=2)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
