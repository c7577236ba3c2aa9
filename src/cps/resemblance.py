"""Resemblance: whether images of a new class look like a class that the model knows already.

A head of a few classes is sure of itself whatever it sees, so its softmax tells little. How large its outputs are on
images of its own classes tells more: it is noted for each class when a task is learned, from held-out images.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cps.learner import Learner

CLAIMED = 0.8  # share of a new class's images that go to one old class, from which a warning is due ...
STRONGLY = 0.6  # ... if this share do so as strongly as its own
FEWEST = 4  # images of a class that can tell anything
MOST = 64  # images of a class that are looked at


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
    usual = {task: _noted(subnetwork.notes) for task, subnetwork in enumerate(learner.network.subnetworks)}
    for name in dict.fromkeys(labels) if any(usual.values()) else ():
        own = images[torch.tensor([label == name for label in labels])][:MOST]
        for task, known in usual.items():
            claimed = _claimed(learner, task, known, own) if known and len(own) >= FEWEST else None
            if claimed is not None:
                found.append(
                    f"images of '{name}' look like '{claimed}' of task {task + 1} to the model; if they are the same, "
                    "stop here and keep to one name"
                )
    return found


def _noted(notes: Mapping[str, Any]) -> dict[str, float]:
    """Return the usual outputs that notes hold; they may be anyone's, and say otherwise."""
    noted = notes.get("usual output")
    return {k: v for k, v in noted.items() if isinstance(v, float)} if isinstance(noted, dict) else {}


def _claimed(learner: Learner, task: int, usual: Mapping[str, float], images: Tensor) -> str | None:
    """Return the class of a task that claims nearly all of the images, most as strongly as its own; else None."""
    largest = learner.evidence(images)[task].logits.amax(dim=1).tolist()
    names = [str(name) for name in learner.predict(images, task=task).classes]
    name, claimed = Counter(names).most_common(1)[0]
    strongly = sum(
        own == name and output >= usual.get(name, torch.inf) for own, output in zip(names, largest, strict=True)
    )
    is_claimed = claimed >= CLAIMED * len(images) and strongly >= STRONGLY * len(images)
    return name if is_claimed else None
