"""The model that the server predicts with; it is reloaded when its file changes.

A changed file is loaded and checked before it replaces the old model. If it cannot be loaded, the old model stays in
use, and `ServedModel.problem` says why.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from cps.app.class_accuracy import read_confusion
from cps.app.predict_files import image_format_of
from cps.app.task_metadata import without_digests
from cps.data.decode import ImageFormat
from cps.data.examples import ClassName
from cps.data.images import square_size
from cps.evaluation.confusion import Confusion
from cps.learner import Learner
from cps.loading import Load, load
from cps.network.outputs import Evidence
from cps.network.shared import SharedNetwork
from cps.runtime.devices import make_fabric
from cps.selection.base import Oracle
from cps.selection.groups import consecutive_groups
from cps.selection.predict import best_class, predict
from cps.selection.prediction import Prediction
from cps.selection.rejection import FEW_HELD_OUT
from cps.serve.middleware import Limits
from cps.serve.schemas import ClassInfo, ImageReply, LimitsInfo, ModelReply, PairInfo, TaskInfo, TaskReply
from cps.storage.reload import ReloadedFile

MOST_PAIRS = 100  # of confused classes in a reply
MAX_IMAGE_SIZE = 1024  # pixels a side; a larger model would let small uploads take much memory


@dataclass(frozen=True)
class LoadedModel:
    """A learner, the format of its images, the replies of GET /model and /confusion.svg, and when it was loaded."""

    learner: Learner
    image_format: ImageFormat
    description: bytes
    confusion: bytes
    loaded_at: datetime


class ServedModel:
    """The model of a file, reloaded by `refresh` when the file changes."""

    def __init__(
        self, path: str | Path, limits: Limits, *, reject: float = 0.01, accelerator: str = "cpu", load: Load = load
    ):
        """`reject` is the share of known images that may be called unknown; `load` opens the file."""
        self.path, self.limits, self.reject = Path(path), limits, reject
        fabric = make_fabric(accelerator=accelerator)
        self._file = ReloadedFile(self.path, lambda: _prepare(load(self.path, fabric=fabric), self.path, limits))

    @property
    def model(self) -> LoadedModel:
        """The model in use."""
        return self._file.value

    @property
    def problem(self) -> str | None:
        """Why the current file could not be loaded, or None."""
        return self._file.problem

    def refresh(self) -> bool:
        """Reload the file if it has changed; return True if a new model is in use."""
        return self._file.refresh()

    def predict(
        self, model: LoadedModel, images: Tensor, names: Sequence[str], *, group: bool, task: int | None = None
    ) -> list[ImageReply]:
        """Return a reply for each of the images (N, 3, size, size), which have these file names.

        With `group`, all images are assumed to share a task. `task` gives their task, from 0.
        """
        group_size = len(images) if group else 1
        with model.learner.network.in_use():
            return _predict(model.learner, images, names, group_size=group_size, task=task, reject=self.reject)


def _prepare(learner: Learner, path: Path, limits: Limits) -> LoadedModel:
    """Check a learner and run it once on a blank image, so that the first request is not slow."""
    learner.network.mute(FEW_HELD_OUT)  # `cps learn` has warned already
    shape = learner.network.input_shape
    if not learner.network.subnetworks or shape is None:
        raise ValueError(f"'{path}' has learned no task yet; learn one before serving it")
    size = square_size(shape)
    if size is None or size > MAX_IMAGE_SIZE:
        raise ValueError(
            f"cannot serve '{path}': its images must be colour images (3, size, size) with size <= {MAX_IMAGE_SIZE}, "
            f"got {shape}"
        )
    _predict(learner, torch.zeros(1, *shape, dtype=torch.uint8), [""])
    confusion = read_confusion((each.classes, each.notes) for each in learner.network.subnetworks)
    description = _describe(path, learner, size, limits, confusion).model_dump_json(by_alias=True).encode()
    picture = confusion.picture().encode("utf-8", "replace")
    return LoadedModel(learner, image_format_of(learner), description, picture, datetime.now(UTC))


def _predict(
    learner: Learner,
    images: Tensor,
    names: Sequence[str],
    *,
    group_size: int = 1,
    task: int | None = None,
    reject: float = 0.0,
) -> list[ImageReply]:
    network, selector = learner.network, learner.config.selectors[0]
    evidence = learner.evidence(images)
    groups = consecutive_groups(len(images), group_size, network.device)
    selected = predict(network, evidence, selector, groups, reject=reject)
    prediction = selected if task is None else predict(network, evidence, Oracle(task), groups, reject=reject)
    tasks = _task_replies(network, evidence, selected)
    return [
        ImageReply(
            file=name,
            class_=None if class_name is None else _encodable(class_name),
            version=network.version(int(prediction.tasks[index]), class_name),
            unknown=class_name is None,
            task=int(prediction.tasks[index]) + 1,
            share=_finite(float(prediction.share[index])),
            confidence=_finite(float(prediction.confidence[index])),
            tasks=tasks[index],
        )
        for index, (name, class_name) in enumerate(zip(names, prediction.classes, strict=True))
    ]


def _task_replies(network: SharedNetwork, evidence: Evidence, prediction: Prediction) -> list[list[TaskReply]]:
    """Return for each image what every subnetwork that ran for it predicts, with the task scores of `prediction`."""
    scores, shares = prediction.task_scores.tolist(), prediction.task_shares.tolist()
    replies: list[list[TaskReply]] = [[] for _ in scores]
    for task, subnetwork in enumerate(network.subnetworks):
        images = evidence.ran(task)
        if not len(images):
            continue
        confidence, best = best_class(evidence.some(task, images).logits.cpu())
        for index, name, value in zip(images.tolist(), subnetwork.names(best), confidence.tolist(), strict=True):
            replies[index].append(
                TaskReply(
                    task=task + 1,
                    score=_finite(scores[index][task]),
                    share=_finite(shares[index][task]),
                    class_=_encodable(name),
                    confidence=_finite(value),
                )
            )
    return replies


def _describe(path: Path, learner: Learner, size: int, limits: Limits, confusion: Confusion) -> ModelReply:
    """Return the reply of GET /model."""
    network = learner.network
    tasks = []
    for task, subnetwork in enumerate(network.subnetworks):
        fingerprint = learner.fingerprint(task)
        tasks.append(
            TaskInfo(
                task=task + 1,
                classes=[_encodable(name) for name in subnetwork.classes],
                density=network.density(task),
                fingerprint=fingerprint.tensors,
                outputs=fingerprint.outputs,
                notes=without_digests(subnetwork.notes),
            )
        )
    return ModelReply(
        file=path.name,
        tasks=tasks,
        free=network.free_share(),
        free_by_layer=network.free_by_layer(),
        image_size=size,
        selector=learner.config.selectors[0].name,
        limits=LimitsInfo(images=limits.images, megabytes=limits.megabytes, megapixels=limits.megapixels),
        accuracy=[
            ClassInfo(class_=str(_encodable(name)), right=right, held_out=images)
            for name, right, images in confusion.classes
        ],
        confused=[
            PairInfo(classes=[str(_encodable(one)), str(_encodable(other))], images=images)
            for one, other, images in confusion.pairs[:MOST_PAIRS]
        ],
    )


def _finite(number: float) -> float | None:
    """Return a finite number, or None: JSON has no NaN or infinity."""
    return number if math.isfinite(number) else None


def _encodable(name: ClassName) -> ClassName:
    """Return a class name that UTF-8 can encode: a model file may contain a lone surrogate."""
    return name.encode("utf-8", "replace").decode() if isinstance(name, str) else name
