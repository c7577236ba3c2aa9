"""Resemblance: whether images of a new class look like a class that the model knows already.

A head of a few classes is sure of itself whatever it sees, so its softmax tells little. How large its outputs are on
images of its own classes tells more: it is noted for each class when a task is learned, from held-out images.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cps.app.task_metadata import usual_outputs_of
from cps.learner import Learner
from cps.network.outputs import Evidence
from cps.selection.predict import classify

CLAIMED = 0.8  # share of a new class's images that go to one old class, from which a warning is due ...
STRONGLY = 0.6  # ... if this share do so as strongly as its own
FEWEST = 4  # images of a class that can tell anything
MOST = 32  # images of a class that are looked at


def usual_outputs(learner: Learner, task: int, images: Tensor, labels: Sequence[Any]) -> dict[str, float]:
    """Return, for each class of a task with enough of these images, the lower quartile of the head's largest output."""
    largest = learner.evidence(images)[task].logits.amax(dim=1).cpu()
    usual = {}
    for name in dict.fromkeys(labels):
        own = largest[torch.tensor([label == name for label in labels])]
        if len(own) >= FEWEST:
            usual[str(name)] = round(float(own.quantile(0.25)), 4)
    return usual


def lookalikes(learner: Learner, images: Tensor, labels: Sequence[str]) -> list[str]:
    """Return a warning for each new class whose images an old subnetwork takes for one of its own classes."""
    found = []
    usual = {task: usual_outputs_of(subnetwork.notes) for task, subnetwork in enumerate(learner.network.subnetworks)}
    for name, number in Counter(labels).items() if any(usual.values()) else ():
        if number < FEWEST:
            continue
        own = images[torch.tensor([label == name for label in labels])][:MOST]
        evidence = learner.evidence(own)
        evidence.ask(range(len(usual)))  # together costs less
        for task, known in usual.items():
            claimed = _claimed(learner, evidence, task, known)
            if claimed is not None:
                found.append(
                    f"images of '{name}' look like '{claimed}' of task {task + 1} to the model; if they are the same, "
                    "stop this with Ctrl-C and keep to one name"
                )
    return found


def _claimed(learner: Learner, evidence: Evidence, task: int, usual: Mapping[str, float]) -> str | None:
    """Return the class of a task that claims nearly all of the images, most as strongly as its own; else None."""
    largest = evidence[task].logits.amax(dim=1)
    tasks = torch.full_like(largest, task, dtype=torch.long)
    names = [str(name) for name in classify(learner.network, evidence, tasks).classes]
    name, claimed = Counter(names).most_common(1)[0]
    level = usual.get(name, float("inf"))
    strongly = sum(own == name and output >= level for own, output in zip(names, largest.tolist(), strict=True))
    return name if claimed >= CLAIMED * len(names) and strongly >= STRONGLY * len(names) else None
