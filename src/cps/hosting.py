"""Hosting: a model that answers for as long as the server runs, and is read again when its file changes.

A new file is loaded and checked before it takes the place of the old model. One that is damaged changes nothing but
what `problem` says.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cps.data import ClassName
from cps.devices import make_fabric
from cps.gate import Limits
from cps.images import side_of
from cps.learner import Learner
from cps.loading import load
from cps.prediction import classify
from cps.replies import ImageReply, LimitsInfo, ModelReply, TaskInfo, TaskReply
from cps.selection import best_task, consecutive_groups, task_scores
from cps.storage import stamp_of

if TYPE_CHECKING:
    from lightning_fabric import Fabric

log = logging.getLogger(__name__)

LARGEST = 1024  # pixels of a side that a model may ask for


@dataclass(frozen=True)
class Hosted:
    """A model that is ready to answer; `about` is the reply to who asks for it, as JSON."""

    learner: Learner
    size: int
    about: bytes
    loaded: datetime


class Host:
    """Holds the model of a file."""

    def __init__(self, path: str | Path, limits: Limits, *, reject: float = 0.01, accelerator: str = "cpu"):
        """`reject` is the share of known images that may be called unknown."""
        self.path, self.limits, self.reject = Path(path), limits, reject
        self.fabric = make_fabric(accelerator=accelerator)
        self.problem: str | None = None
        self._stamp = stamp_of(self.path)
        self.model = _hosted(self.path, limits, self.fabric)

    def refresh(self) -> bool:
        """Read the file again if it has changed, and say whether a new model answers now."""
        stamp = stamp_of(self.path)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            self.model = _hosted(self.path, self.limits, self.fabric)
        except Exception as error:  # whatever is wrong with the new file, the old model answers
            self.problem = str(error).encode("utf-8", "replace").decode()
            log.warning("the old model stays: %s", self.problem)
            return False
        self.problem = None
        return True

    def predict(self, model: Hosted, images: Tensor, names: Sequence[str], *, group: bool) -> list[ImageReply]:
        """Return what the model says about images (N, 3, size, size); as a group, all share a task."""
        with model.learner.network.in_use():
            return _replies(model.learner, images, names, len(images) if group else 1, self.reject)


def _hosted(path: Path, limits: Limits, fabric: "Fabric") -> Hosted:
    """Load a model and let it look at a blank image, so that the first request finds everything ready."""
    learner = load(path, fabric=fabric)
    shape = learner.network.input_shape
    if not learner.network.subnetworks or shape is None:
        raise ValueError(f"'{path}' has learned nothing yet; there is nothing to serve")
    side = side_of(shape)
    if side is None or side > LARGEST:
        raise ValueError(
            f"'{path}' was learned with images {shape}; served are colour images (3, size, size), size <= 1024"
        )
    _replies(learner, torch.zeros(1, *shape, dtype=torch.uint8), [""], 1, 0.0)
    about = _about(path, learner, limits).model_dump_json(by_alias=True).encode()
    return Hosted(learner, side, about, datetime.now(UTC))


def _replies(
    learner: Learner, images: Tensor, names: Sequence[str], group_size: int, reject: float
) -> list[ImageReply]:
    network, selector = learner.network, learner.selectors[0]
    evidence = learner.evidence(images)
    groups = consecutive_groups(len(images), group_size, network.device)
    scores = task_scores(selector, evidence, network.statistics(selector.name), groups)[groups]  # (N, tasks)
    chosen = classify(network, evidence, best_task(scores), reject=reject)
    every = [classify(network, evidence, torch.full_like(groups, task)) for task in range(len(evidence))]
    shares = scores.softmax(dim=1)
    replies = []
    for index, name in enumerate(names):
        tasks = [
            TaskReply(
                task=task + 1,
                score=_number(scores[index, task]),
                share=_number(shares[index, task]),
                class_=_name(said.classes[index]),
                confidence=_number(said.confidence[index]),
            )
            for task, said in enumerate(every)
        ]
        is_unknown = chosen.classes[index] is None
        replies.append(
            ImageReply(
                file=name,
                class_=None if is_unknown else _name(chosen.classes[index]),
                unknown=is_unknown,
                task=int(chosen.tasks[index]) + 1,
                confidence=_number(chosen.confidence[index]),
                tasks=tasks,
            )
        )
    return replies


def _about(path: Path, learner: Learner, limits: Limits) -> ModelReply:
    network = learner.network
    tasks = []
    for task, subnetwork in enumerate(network.subnetworks):
        fingerprint = learner.fingerprint(task)
        tasks.append(
            TaskInfo(
                task=task + 1,
                classes=[_name(name) for name in subnetwork.classes],
                density=network.density(task),
                fingerprint=fingerprint.tensors,
                outputs=fingerprint.outputs,
                notes=subnetwork.notes,
            )
        )
    return ModelReply(
        file=path.name,
        tasks=tasks,
        free=network.free_share(),
        free_by_layer=network.free(),
        image_size=(network.input_shape or (0,))[-1],
        selector=learner.selectors[0].name,
        limits=LimitsInfo(images=limits.images, megabytes=limits.megabytes, megapixels=limits.megapixels),
    )


def _number(value: Tensor) -> float | None:
    """Return a number that JSON can hold, or None."""
    number = float(value)
    return number if math.isfinite(number) else None


def _name(name: ClassName | None) -> str | int:
    """Return a class name that any text can hold; a file may name a class by half a character."""
    assert name is not None
    return name.encode("utf-8", "replace").decode() if isinstance(name, str) else name
