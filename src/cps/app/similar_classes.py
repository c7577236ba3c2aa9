"""Find new classes that the model has probably learned already: by their images or by their name.

The softmax of a head with few classes is confident on any image, so it says little. The size of its logits says more:
when a task is learned, the largest logit that is typical for each class is measured on held-out images and noted.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from cps.app.task_metadata import read_typical_outputs
from cps.learner import Learner
from cps.network.outputs import Evidence, Outputs
from cps.selection.predict import best_class

MIN_SHARE = 0.8  # share of a new class's images that must be assigned to the same learned class ...
MIN_STRONG_SHARE = 0.6  # ... and share with a logit as large as for that class's own images
MIN_IMAGES = 4  # of a class, below which it is not compared
MAX_IMAGES = 32  # of a class that are compared


def typical_outputs(outputs: Outputs, labels: Sequence[Any]) -> dict[str, float]:
    """Return the lower quartile of the largest logit for each class of a task that has enough of these images."""
    largest = outputs.logits.amax(dim=1).cpu()
    typical = {}
    for name in dict.fromkeys(labels):
        own = largest[torch.tensor([label == name for label in labels])]
        if len(own) >= MIN_IMAGES:
            typical[str(name)] = round(float(own.quantile(0.25)), 4)
    return typical


def find_similar_images(
    learner: Learner, evidence_of: Callable[[list[int]], Evidence], labels: Sequence[str]
) -> Iterator[tuple[str, str, int]]:
    """Yield each new class whose images a learned task takes for one of its classes: (new class, class, task).

    `evidence_of` returns the evidence of the images with some indices.
    """
    typical = {task: read_typical_outputs(each.notes) for task, each in enumerate(learner.network.subnetworks)}
    if not any(typical.values()):
        return
    for name, count in Counter(labels).items():
        if count < MIN_IMAGES:
            continue
        evidence = evidence_of([index for index, label in enumerate(labels) if label == name][:MAX_IMAGES])
        evidence.compute(range(len(typical)))  # one pass over all tasks is faster than one for each
        for task, levels in typical.items():
            similar = _similar_class(learner, evidence, task, levels)
            if similar is not None:
                yield name, similar, task


def find_similar_names(names: Sequence[str], learned: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each name that differs only by case or spaces from a learned or an earlier name, with that name."""
    for index, name in enumerate(names):
        for other in (*learned, *names[:index]):
            if other != name and _simplified(other) == _simplified(name):
                yield name, other
                break


def _similar_class(learner: Learner, evidence: Evidence, task: int, typical: Mapping[str, float]) -> str | None:
    """Return the class of a task to which nearly all images are assigned, most with a typical logit; else None."""
    logits = evidence[task].logits.cpu()
    names = [str(name) for name in learner.network.subnetworks[task].names(best_class(logits)[1])]
    name, count = Counter(names).most_common(1)[0]
    level = typical.get(name, float("inf"))
    strong = sum(
        own == name and output >= level for own, output in zip(names, logits.amax(dim=1).tolist(), strict=True)
    )
    return name if count >= MIN_SHARE * len(names) and strong >= MIN_STRONG_SHARE * len(names) else None


def _simplified(name: str) -> str:
    return "".join(name.casefold().split())
