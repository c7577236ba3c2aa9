"""Hosting: a model that answers for as long as the server runs, and is read again when its file changes.

A new file is loaded and checked before it takes the place of the old model. One that is damaged changes nothing but
what `problem` says.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from cps.data.examples import ClassName
from cps.data.images import side_of
from cps.learner import Learner
from cps.loading import Load, load
from cps.runtime.devices import make_fabric
from cps.selection.base import best_task, task_scores, task_shares
from cps.selection.groups import consecutive_groups
from cps.selection.predict import classify
from cps.selection.rejection import ROUGH
from cps.serve.middleware import Limits
from cps.serve.schemas import ImageReply, LimitsInfo, ModelReply, TaskInfo, TaskReply
from cps.storage.reload import ReloadedFile

LARGEST = 1024  # pixels of a side that a model may ask for


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to answer; `about` is the reply to who asks for it, as JSON."""

    learner: Learner
    size: int
    about: bytes
    loaded: datetime


class ServedModel:
    """Holds the model of a file."""

    def __init__(
        self, path: str | Path, limits: Limits, *, reject: float = 0.01, accelerator: str = "cpu", load: Load = load
    ):
        """`reject` is the share of known images that may be called unknown; `load` opens the file."""
        self.path, self.limits, self.reject = Path(path), limits, reject
        fabric = make_fabric(accelerator=accelerator)
        self._followed = ReloadedFile(self.path, lambda: _hosted(load(self.path, fabric=fabric), self.path, limits))

    @property
    def model(self) -> LoadedModel:
        """The model that answers."""
        return self._followed.made

    @property
    def problem(self) -> str | None:
        """What is wrong with the file now on the disk, if anything is."""
        return self._followed.problem

    def refresh(self) -> bool:
        """Read the file again if it has changed, and say whether a new model answers now."""
        return self._followed.refresh()

    def predict(
        self, model: LoadedModel, images: Tensor, names: Sequence[str], *, group: bool, task: int | None = None
    ) -> list[ImageReply]:
        """Return what the model says about images (N, 3, size, size).

        As a group, all share a task; it is that `task`, from 0, if it is told.
        """
        size = len(images) if group else 1
        with model.learner.network.in_use():
            return _replies(model.learner, images, names, group_size=size, task=task, reject=self.reject)


def _hosted(learner: Learner, path: Path, limits: Limits) -> LoadedModel:
    """Let a model look at a blank image, so that the first request finds everything ready."""
    learner.network.warned.add(ROUGH)  # which `cps learn` has said
    shape = learner.network.input_shape
    if not learner.network.subnetworks or shape is None:
        raise ValueError(f"'{path}' has learned nothing yet; there is nothing to serve")
    side = side_of(shape)
    if side is None or side > LARGEST:
        raise ValueError(
            f"'{path}' was learned with images {shape}; served are colour images (3, size, size), size <= {LARGEST}"
        )
    _replies(learner, torch.zeros(1, *shape, dtype=torch.uint8), [""])
    about = _about(path, learner, limits).model_dump_json(by_alias=True).encode()
    return LoadedModel(learner, side, about, datetime.now(UTC))


def _replies(
    learner: Learner,
    images: Tensor,
    names: Sequence[str],
    *,
    group_size: int = 1,
    task: int | None = None,
    reject: float = 0.0,
) -> list[ImageReply]:
    network, selector = learner.network, learner.selectors[0]
    evidence = learner.evidence(images)
    groups, statistics = consecutive_groups(len(images), group_size), network.statistics(selector.name)
    by_group = task_scores(selector, evidence, statistics, groups.to(network.device))  # (groups, tasks)
    found = best_task(by_group)[groups] if task is None else torch.full_like(groups, task)
    chosen = classify(network, evidence, found, reject=reject)
    every = [classify(network, evidence, torch.full_like(groups, each)) for each in range(len(evidence))]
    confidence = [said.confidence.tolist() for said in every]
    scores, shares = by_group[groups].tolist(), task_shares(by_group, torch.bincount(groups))[groups].tolist()
    replies = []
    for index, name in enumerate(names):
        tasks = [
            TaskReply(
                task=each + 1,
                score=_number(scores[index][each]),
                share=_number(shares[index][each]),
                class_=_name(said.classes[index]),
                confidence=_number(confidence[each][index]),
            )
            for each, said in enumerate(every)
        ]
        is_unknown = chosen.classes[index] is None
        replies.append(
            ImageReply(
                file=name,
                class_=None if is_unknown else _name(chosen.classes[index]),
                unknown=is_unknown,
                task=int(chosen.tasks[index]) + 1,
                share=1.0 if task is not None else tasks[int(chosen.tasks[index])].share,
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
