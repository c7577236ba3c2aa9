"""`python -m benchmarks.streams MODEL --data DIR --out FILE`: images in a row, strange ones, and parts of the selector.

MODEL is the `model.cps` of a run of `cps bench`. Streams of test images change their task at several rates. For
strangers only the first half of the tasks counts as learned; images of the others are to be told from theirs.
"""

import argparse
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import cps
from benchmarks.ablation import selectors_around
from benchmarks.paper import compact
from cps.bench import describe_device, versions
from cps.data import as_examples, in_order
from cps.evidence import Evidence, Outputs
from cps.familiarity import STEPS, how_familiar
from cps.metrics import auroc, false_positive_rate
from cps.prediction import classify
from cps.recipes import RECIPES
from cps.selection import select
from cps.storage import write_text
from cps.subnetwork import local_labels

RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.9)
DRAWS = 5  # streams at each rate
REJECT = (0.01, 0.05, 0.1, 0.2)


class Tested(NamedTuple):
    """Test images of all tasks, one task after the other: what subnetworks say about them, their classes, and tasks."""

    outputs: Sequence[Outputs]
    classes: list[Any]
    tasks: Tensor

    def evidence(self, which: Tensor, tasks: int) -> Evidence:
        """Return the evidence of some of the images by the first subnetworks."""
        return Evidence(lambda asked: [Outputs(*(part[which] for part in self.outputs[task])) for task in asked], tasks)


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
        "strangers": strangers(learner, selectors["Cascade"], tested),
        "selectors": single_images(learner, selectors["Cascade"], tested),
    }
    write_text(arguments.out, compact(found))


def look(learner: cps.Learner, tasks: Iterable[cps.Task]) -> Tested:
    """Let every subnetwork look at all test images."""
    classes, numbers, outputs = [], [], []
    for number, task in enumerate(tasks):
        names = list(task.classes)
        for images, labels in in_order(as_examples(task.test, partial(local_labels, names))):
            classes += [names[label] for label in labels.tolist()]
            numbers += [number] * len(labels)
            outputs.append(list(learner.evidence(images)))
    joined = [Outputs(*(torch.cat(parts) for parts in zip(*each, strict=True))) for each in zip(*outputs, strict=True)]
    return Tested(joined, classes, torch.tensor(numbers))


def single_images(learner: cps.Learner, cascade: Any, tested: Tested) -> dict[str, dict[str, float]]:
    """Return how many single images find their class and their task, with parts of the cascade on and off."""
    found = {}
    everything = torch.arange(len(tested.tasks), device=learner.network.device)
    evidence = tested.evidence(everything, len(tested.outputs))
    for name, selector in selectors_around(cascade).items():
        tasks = select(selector, evidence, learner.network.statistics(selector.name), everything)
        said = classify(learner.network, evidence, tasks).classes
        right = sum(a == b for a, b in zip(said, tested.classes, strict=True)) / len(said)
        found[name] = {"class": 100 * right, "task": 100 * float((tasks.cpu() == tested.tasks).double().mean())}
        print(name, found[name], flush=True)
    return found


def streams(learner: cps.Learner, selector: cps.Selector, tested: Tested, images: int) -> dict[str, float]:
    """Return the accuracy on streams that change their task at each rate, the mean over several draws."""
    found = {}
    for rate in RATES:
        right = []
        for seed in range(DRAWS):
            chosen = _stream_of(tested.tasks, rate, images, seed)
            evidence = tested.evidence(chosen.to(learner.network.device), len(tested.outputs))
            said = learner.stream(selector=selector).predict_by(evidence).classes
            right += [tested.classes[i] == name for i, name in zip(chosen, said, strict=True)]
        found[str(rate)] = 100 * sum(right) / len(right)
        print(selector.name, rate, found[str(rate)], flush=True)
    return found


def strangers(learner: cps.Learner, selector: cps.Selector, tested: Tested) -> dict[str, Any]:
    """Return how well images of tasks that were not learned are told from others, with the first half learned."""
    network, half = learner.network, len(tested.outputs) // 2
    everything = torch.arange(len(tested.tasks), device=network.device)
    evidence = tested.evidence(everything, half)
    tasks = select(selector, evidence, network.statistics(selector.name)[:half], everything)
    familiar = how_familiar(network, evidence, tasks).cpu()
    known, strange = familiar[tested.tasks < half], familiar[tested.tasks >= half]
    share = {str(r): [100 * float((s < r * STEPS).float().mean()) for s in (known, strange)] for r in REJECT}
    print("AUROC", auroc(known, strange), "rejected", share, flush=True)
    return {
        "AUROC": auroc(known, strange),
        "FPR95": false_positive_rate(known, strange, 0.95),
        "rejected (known, strangers)": share,
    }


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
