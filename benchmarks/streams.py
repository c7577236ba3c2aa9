"""`python -m benchmarks.streams MODEL --data DIR --out FILE`: images in a row, strange ones, and parts of the selector.

MODEL is the `model.cps` of a run of `cps bench`. Streams of test images change their task at several rates. For
strangers only the first half of the tasks counts as learned; images of the others are to be told from theirs.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import cps
from benchmarks.ablation import selectors_around
from benchmarks.paper import compact
from benchmarks.strangers import percent, told_apart
from cps.evaluation.evaluator import Tested, look
from cps.experiments.recipes import RECIPES
from cps.runtime.environment import describe_device, versions
from cps.selection.base import Statistics, select
from cps.storage.container import write_text

RATES = (0.001, 0.002, 0.005, 0.02, 0.05, 0.2, 0.5, 0.9)  # mostly others than those that a stream assumes
DRAWS = 5  # streams at each rate


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
    learner = cps.load(arguments.model, recipe.backbone(), **recipe.learner_settings())
    tested = look(learner, recipe.scenario(arguments.data, arguments.order))
    selectors = {selector.name: selector for selector in learner.selectors if selector.name in ("Cascade", "MaxOutput")}
    found = {
        "recipe": recipe.name,
        "order": arguments.order,
        "device": describe_device(learner.fabric),
        "versions": versions(),
        "images": arguments.images,
        "draws": DRAWS,
        "streams": {name: streams(learner, each, tested, arguments.images) for name, each in selectors.items()},
        "strangers": _strangers(learner, selectors["Cascade"], tested),
        "selectors": single_images(learner, selectors["Cascade"], tested),
    }
    write_text(arguments.out, compact(found))


def single_images(learner: cps.Learner, cascade: Any, tested: Tested) -> dict[str, dict[str, float]]:
    """Return how many single images find their class and their task, with parts of the cascade on and off."""
    found = {}
    for name, selector in selectors_around(cascade).items():
        is_found = found_by(selector, learner.network.statistics(selector.name), tested)
        found[name] = {"class": percent(is_found & tested.right), "task": percent(is_found)}
        print(name, found[name], flush=True)
    return found


def streams(learner: cps.Learner, selector: cps.Selector, tested: Tested, images: int) -> dict[str, float]:
    """Return the accuracy on streams that change their task at each rate, the mean over several draws."""
    found = {}
    for rate in RATES:
        right = []
        for seed in range(DRAWS):
            chosen = _stream_of(tested.task.cpu(), rate, images, seed).to(tested.task.device)
            said = learner.stream(selector=selector).predict_by(tested.of(chosen, tested.tasks)).tasks
            right.append((said.to(chosen.device) == tested.task[chosen]) & tested.right[chosen])
        found[str(rate)] = percent(torch.cat(right))
        print(selector.name, rate, found[str(rate)], flush=True)
    return found


def _strangers(learner: cps.Learner, selector: cps.Selector, tested: Tested) -> dict[str, Any]:
    """Return how well images of the later tasks are told from others, with the first half learned."""
    half = tested.tasks // 2
    return told_apart(learner, selector, tested.of(slice(None), half), tested.task < half)


def found_by(selector: cps.Selector, statistics: Sequence[Statistics], tested: Tested) -> Tensor:
    """Say of each image by itself whether its task is found among all."""
    evidence, images = tested.until(tested.tasks - 1)
    each = torch.arange(images, device=tested.task.device)
    return select(selector, evidence, statistics, each).tasks.to(tested.task.device) == tested.task


def _stream_of(tasks: Tensor, rate: float, images: int, seed: int) -> Tensor:
    """Return which images come in a row, the next one of another task at that rate."""
    draws = np.random.default_rng(seed)
    number = int(tasks.max()) + 1
    places = [(tasks == task).nonzero()[:, 0] for task in range(number)]
    task = int(draws.integers(number))
    chosen = []
    for _ in range(images):
        if draws.random() < rate:
            task = int((task + draws.integers(1, number)) % number)
        chosen.append(int(places[task][int(draws.integers(len(places[task])))]))
    return torch.tensor(chosen)


if __name__ == "__main__":
    main()
