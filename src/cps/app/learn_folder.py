"""Learn a folder of new classes into a model file, which is replaced only when learning has finished.

While it learns, a checkpoint and a lock lie beside the model. Running it again resumes from the checkpoint. No images
are stored.
"""

import datetime
import time
import unicodedata
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

import cps
from cps.app import task_metadata as keys
from cps.app.autoconfig import AutoConfig, Choice, Options, apply_options, choose_config, limit_epochs
from cps.app.estimate import affordable_epochs
from cps.app.folder_scan import FolderScan, OnProgress
from cps.app.predict_files import image_size
from cps.app.similar_classes import find_similar_images, find_similar_names, typical_outputs
from cps.data.decode import ImageError
from cps.data.image_folder import FolderImages, ImageFolder
from cps.data.rotations import Rotations, RotationScheme
from cps.data.tasks import Task
from cps.learner import Learner
from cps.loading import load
from cps.network.pretrained import installed_backbone, load_pretrained
from cps.network.trunk import suggest_trunk
from cps.runtime.environment import reproducibility_context
from cps.storage import atomic, container
from cps.storage.settings_codec import upgrade_settings

if TYPE_CHECKING:
    from lightning_fabric import Fabric

Labelled = tuple[Tensor, list[str]]  # images, and the class of each


@dataclass(frozen=True)
class LearningPlan:
    """What is about to be learned: the folder, and the learner with its settings.

    `classes` maps the name of each folder to its class. The two differ if the class is a new version of a learned one.
    `is_frozen` tells that the task is learned without training, on frozen pretrained features. `warning` is text for
    the user, or "". `learned_as` is the index of the task as which the same images were learned before, or None.
    """

    model: Path
    learner: Learner
    scan: FolderScan
    size: int
    choices: tuple[Choice, ...]
    classes: Mapping[str, str]
    is_frozen: bool = False
    warning: str = ""
    learned_as: int | None = None

    @property
    def rotations(self) -> RotationScheme:
        """The learner's rotations; for a single class all four, since training needs something to tell apart."""
        rotations = self.learner.config.rotations
        needs_rotations = len(self.classes) == 1 and rotations.num_rotations == 1 and not self.is_frozen
        return Rotations(flips=rotations.flips) if needs_rotations else rotations


class LearnedTask(NamedTuple):
    """The index of a learned task, and the notes about it."""

    task: int
    notes: dict[str, Any]


def make_plan(
    model: str | Path,
    scan: FolderScan,
    options: Options,
    fabric: "Fabric",
    *,
    weights: Path | None = None,
    as_version: bool = False,
) -> LearningPlan:
    """Load the model, or choose the settings of a new one.

    Raise `ValueError` for a class that the model has learned already, unless `as_version`.
    """
    model = Path(model)
    if model.exists():
        learner = load(model, fabric=fabric)
        size, warning = image_size(learner), ""
        choices, is_frozen = apply_options(options, learner, size)
    else:
        config = choose_config(scan, options, has_gpu=fabric.device.type == "cuda", installed=installed_backbone())
        size, choices, is_frozen, warning = config.size, config.choices, config.is_frozen, config.warning
        learner = _new_learner(config, fabric, weights)
    if options.minutes is not None:
        images, classes = len(scan.files), len(scan.counts)
        limited = limit_epochs(learner, affordable_epochs(learner, size, images, classes, 60 * options.minutes))
        choices = tuple(limited if choice.name == limited.name else choice for choice in choices)
    plan = LearningPlan(model, learner, scan, size, choices, {}, is_frozen, warning)
    for task, subnetwork in enumerate(learner.network.subnetworks):
        if subnetwork.notes.get(keys.SCAN_DIGEST) == scan.digest:
            if _checkpoint_header(model, learner) is None:
                atomic.remove(checkpoint_path(model))  # left by a run that was killed after it had saved the model
            return replace(plan, learned_as=task)
    return replace(plan, classes=_class_names(scan, learner, as_version))


def _new_learner(config: AutoConfig, fabric: "Fabric", weights: Path | None) -> Learner:
    """Return the learner of a new model; `weights` is a file of pretrained weights, or None for the published ones."""
    if not config.is_pretrained:
        return Learner(config.backbone, **config.settings, fabric=fabric)
    pretrained = load_pretrained(config.backbone, weights)
    blank = torch.zeros(2, config.backbone.channels, config.size, config.size)
    settings = {**config.settings, "trunk": suggest_trunk(pretrained.module, blank), "fabric": fabric}
    return Learner(pretrained.module, **settings, architecture=pretrained.architecture)


def checkpoint_path(model: str | Path) -> Path:
    """Return the path of the checkpoint, which lies beside the model."""
    return Path(f"{model}.checkpoint")


def can_resume(plan: LearningPlan) -> bool:
    """Return True if an interrupted run of the same classes and settings left a checkpoint."""
    return _matching_checkpoint(plan) is not None


def _matching_checkpoint(plan: LearningPlan) -> dict[str, Any] | None:
    """Return the header of the checkpoint if it has the classes and settings of the plan."""
    header = _checkpoint_header(plan.model, plan.learner)
    if header is None:
        return None
    settings = replace(plan.learner.config, rotations=plan.rotations).encode()
    stored = upgrade_settings(header["identity"]["settings"])
    same_settings = {name: value for name, value in stored.items() if name in settings} == settings
    return header if same_settings and header["identity"]["classes"] == list(plan.classes.values()) else None


def _checkpoint_header(model: str | Path, learner: Learner) -> dict[str, Any] | None:
    """Return the header of the checkpoint beside a model if it is of the next task to be learned."""
    try:
        header = container.read_header(checkpoint_path(model), "checkpoint")
    except (FileNotFoundError, container.FileError):
        return None
    return header if header["identity"].get("task") == len(learner.network.subnetworks) else None


def decode_images(
    plan: LearningPlan, *, skip_damaged: bool = False, on_progress: OnProgress | None = None
) -> FolderImages:
    """Decode all images of the folder to the model's image size."""

    def report(done: int, total: int) -> None:
        if on_progress is not None:
            on_progress("decoding images", done, total, "")

    folder = ImageFolder(
        plan.scan.folder, size=plan.size, files=plan.scan.files, skip_damaged=skip_damaged, on_progress=report
    )
    try:
        return folder.read()
    except ImageError as error:
        raise ImageError(f"{error}\nuse --skip-damaged to skip such images" if not skip_damaged else error) from None


def learn_folder(
    plan: LearningPlan, decoded: FolderImages, *, hold_out: float = 0.1, on_progress: OnProgress | None = None
) -> LearnedTask:
    """Learn the decoded images as a task, measure the accuracy on held-out images, and replace the model file."""
    start = time.monotonic() - (_matching_checkpoint(plan) or {}).get("seconds", 0.0)
    learner, classes = plan.learner, list(plan.classes.values())
    train, held_out = _split(plan, decoded, hold_out)
    _learn(plan, Task(classes, train=train, val=held_out if held_out[1] else None), on_progress)
    task = len(learner.network.subnetworks) - 1
    counts = Counter(train[1] + held_out[1])
    notes = {
        keys.DATE: datetime.date.today().isoformat(),
        keys.FOLDER: plan.scan.folder.resolve().name,
        keys.SCAN_DIGEST: plan.scan.digest,
        keys.NUM_IMAGES: counts.total(),
        keys.CLASS_COUNTS: {name: counts[name] for name in classes},
        keys.NUM_SKIPPED: len(decoded.skipped),
        keys.NUM_HELD_OUT: len(held_out[1]),
        keys.ACCURACY: _accuracy(learner, task, *held_out),
        keys.TYPICAL_OUTPUTS: typical_outputs(learner, task, *held_out) if held_out[1] else {},
        keys.SECONDS: round(time.monotonic() - start, 1),
        keys.CPS_VERSION: cps.__version__,
        keys.OUTPUTS: {
            keys.OUTPUTS_DIGEST: learner.fingerprint(task).outputs,
            keys.OUTPUTS_CONTEXT: reproducibility_context(learner.network.device),
        },
    }
    learner.annotate(task, **notes)
    learner.save(plan.model)
    atomic.remove(checkpoint_path(plan.model))
    return LearnedTask(task, notes)


def _learn(plan: LearningPlan, task: Task, on_progress: OnProgress | None) -> None:
    """Learn a task as planned, with or without training."""
    report = on_progress or (lambda *_: None)
    if plan.is_frozen:
        plan.learner.learn_frozen(task, on_progress=lambda done, total: report("computing features", done, total, ""))
        return
    plan.learner.learn(
        task,
        checkpoint=checkpoint_path(plan.model),
        rotations=plan.rotations,
        on_epoch=lambda at: report(at.phase_name, at.done, at.total, f"loss {at.loss:.4f}"),
    )


def similar_name_warnings(plan: LearningPlan) -> list[str]:
    """Return a warning for each new class whose name differs from another only by case or spaces."""
    learned = [str(name) for subnetwork in plan.learner.network.subnetworks for name in subnetwork.classes]
    pairs = find_similar_names(list(plan.classes.values()), learned)
    return [f"class '{name}' has nearly the same name as '{other}'; are they the same class?" for name, other in pairs]


def similar_image_warnings(plan: LearningPlan, decoded: FolderImages) -> list[str]:
    """Return a warning for each new class whose images resemble a learned class; new versions may resemble it."""
    new = {folder for folder, name in plan.classes.items() if _normalise(folder) == name}
    chosen = [index for index, label in enumerate(decoded.labels) if label in new]
    if not chosen:
        return []
    similar = find_similar_images(plan.learner, decoded.images[chosen], [decoded.labels[index] for index in chosen])
    return [
        f"images of '{name}' resemble class '{other}' of task {task + 1}; if they are the same class, press Ctrl-C and "
        "use one name for both"
        for name, other, task in similar
    ]


def drop_unreadable_classes(plan: LearningPlan, decoded: FolderImages) -> tuple[LearningPlan, list[str]]:
    """Return the plan without the classes that have no readable image, and the folders of those classes."""
    readable = set(decoded.labels)
    classes = {folder: name for folder, name in plan.classes.items() if folder in readable}
    return replace(plan, classes=classes), [folder for folder in plan.classes if folder not in readable]


def _class_names(scan: FolderScan, learner: Learner, as_version: bool) -> dict[str, str]:
    """Return the class of each folder. A learned class gets a new version if `as_version`, else raise."""
    learned = {_normalise(name): task for task, each in enumerate(learner.network.subnetworks) for name in each.classes}
    classes: dict[str, str] = {}
    for folder in scan.counts:
        name = _normalise(folder)
        if name in learned and not as_version:
            raise ValueError(
                f"class '{name}' was already learned in task {learned[name] + 1}; rename its folder, or use "
                f"--as-version to learn it as '{_new_version(name, {*learned})}'"
            )
        classes[folder] = _new_version(name, {*learned, *classes.values()}) if name in learned else name
    if len(set(classes.values())) != len(classes):
        raise ValueError(f"two folders in '{scan.folder}' have the same class name; rename one of them")
    return classes


def _normalise(name: object) -> str:
    """Return a name in Unicode normal form C, so that names that look the same are the same."""
    return unicodedata.normalize("NFC", str(name))


def _new_version(name: str, names: Collection[str]) -> str:
    """Return the name of the next version of a class, such as "bolt (2)"."""
    number = 2
    while f"{name} ({number})" in names:
        number += 1
    return f"{name} ({number})"


def _split(plan: LearningPlan, decoded: FolderImages, hold_out: float) -> tuple[Labelled, Labelled]:
    """Return the training images and the held-out images."""
    readable = plan.scan.subset(set(decoded.paths))  # hold out images that can be read
    paths = readable.paths
    held_out = {paths[index] for index in readable.held_out(hold_out)}

    def select(is_held_out: bool) -> Labelled:
        indices = [index for index, path in enumerate(decoded.paths) if (path in held_out) == is_held_out]
        images = decoded.images[torch.tensor(indices, dtype=torch.long)]
        return images, [plan.classes[decoded.labels[index]] for index in indices]

    return select(False), select(True)


def _accuracy(learner: Learner, task: int, images: Tensor, labels: list[str]) -> dict[str, float] | None:
    """Return the accuracy on held-out images with the task known and with the task selected; None without images."""
    if not labels:
        return None

    def accuracy(predicted: list[Any]) -> float:
        return round(sum(a == b for a, b in zip(predicted, labels, strict=True)) / len(labels), 4)

    return {
        keys.WITH_TASK_KNOWN: accuracy(learner.predict(images, task=task).classes),
        keys.WITH_TASK_SELECTED: accuracy(learner.predict(images).classes),
    }
