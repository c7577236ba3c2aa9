"""`python -m benchmarks.streams MODEL --data DIR --out FILE`: images in a row, and images of nothing that was learned.

MODEL is the `model.cps` of a run of `cps bench`. Streams of test images change their task at several rates. For
strangers only the first half of the tasks counts as learned; images of the others are to be told from theirs.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import cps
from benchmarks.paper import compact
from cps.bench import describe_device, versions
from cps.data import as_examples, in_order
from cps.familiarity import STEPS, how_familiar
from cps.metrics import auroc, false_positive_rate
from cps.recipes import RECIPES
from cps.selection import consecutive_groups, select
from cps.storage import write_text
from cps.subnetwork import local_labels

RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.9)
REJECT = (0.01, 0.05, 0.1, 0.2)
Tested = list[tuple[Tensor, list[Any]]]  # images and their classes, by task


def main() -> None:
    """Measure a model and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--recipe", default="cifar100-10")
    parser.add_argument("--order", type=int, default=1993)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--images", type=int, default=4000, help="in each stream")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    recipe = RECIPES[arguments.recipe]()
    learner = cps.load(arguments.model, recipe.backbone())
    tested = [_images_of(task) for task in recipe.scenario(arguments.data, arguments.order)]
    found = {
        "recipe": recipe.name,
        "order": arguments.order,
        "device": describe_device(learner.fabric),
        "versions": versions(),
        "images": arguments.images,
        "streams": streams(learner, tested, arguments.images),
        "strangers": strangers(learner, tested),
    }
    write_text(arguments.out, compact(found))


def streams(learner: cps.Learner, tested: Tested, images: int) -> dict[str, dict[str, float]]:
    """Return the accuracy of each selector on streams that change their task at each rate."""
    found: dict[str, dict[str, float]] = {}
    for selector in (cps.Cascade(), cps.MaxOutput()):
        for rate in RATES:
            pictures, truth = _stream_of(tested, rate, images)
            stream = learner.stream(selector=selector)
            said = [name for part in pictures.split(500) for name in stream.predict(part).classes]
            right = sum(a == b for a, b in zip(said, truth, strict=True))
            found.setdefault(selector.name, {})[str(rate)] = 100 * right / images
            print(selector.name, rate, found[selector.name][str(rate)], flush=True)
    return found


def strangers(learner: cps.Learner, tested: Tested) -> dict[str, Any]:
    """Return how well images of tasks that were not learned are told from others, with the first half learned."""
    half = len(tested) // 2
    parts = tested[:half], tested[half:]
    every, learner.network.subnetworks = learner.network.subnetworks, learner.network.subnetworks[:half]
    known, strange = (torch.cat([_familiarity(learner, images) for images, _ in part]) for part in parts)
    learner.network.subnetworks = every
    share = {str(r): [100 * float((s < r * STEPS).float().mean()) for s in (known, strange)] for r in REJECT}
    print("AUROC", auroc(known, strange), "rejected", share, flush=True)
    return {
        "AUROC": auroc(known, strange),
        "FPR95": false_positive_rate(known, strange, 0.95),
        "rejected (known, strangers)": share,
    }


def _familiarity(learner: cps.Learner, images: Tensor) -> Tensor:
    evidence = learner.evidence(images)
    selector = cps.Cascade()
    groups = consecutive_groups(len(images), 1, learner.network.device)
    tasks = select(selector, evidence, learner.network.statistics(selector.name), groups)
    return how_familiar(learner.network, evidence, tasks).cpu()


def _stream_of(tested: Tested, rate: float, images: int) -> tuple[Tensor, list[Any]]:
    """Return images in a row, the next one of another task at that rate."""
    draws = np.random.default_rng(0)
    task = int(draws.integers(len(tested)))
    chosen = []
    for _ in range(images):
        if draws.random() < rate:
            task = int((task + draws.integers(1, len(tested))) % len(tested))
        chosen.append((task, int(draws.integers(len(tested[task][1])))))
    return torch.stack([tested[t][0][i] for t, i in chosen]), [tested[t][1][i] for t, i in chosen]


def _images_of(task: cps.Task) -> tuple[Tensor, list[Any]]:
    names = list(task.classes)
    batches = list(in_order(as_examples(task.test, partial(local_labels, names))))
    return torch.cat([images for images, _ in batches]), [names[i] for _, labels in batches for i in labels.tolist()]


if __name__ == "__main__":
    main()
