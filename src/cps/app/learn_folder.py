"""Learn a folder of new and known classes into a model file, which is replaced only when learning has finished.

While it learns, a checkpoint and a lock lie beside the model. Running it again resumes from the checkpoint. No images
are stored.
"""

import datetime
import time
import unicodedata
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import cps
from cps.app import task_metadata as keys
from cps.app.autoconfig import (
    ONE_CLASS,
    AutoConfig,
    Choice,
    Options,
    apply_options,
    choose_config,
    limit_epochs,
)
from cps.app.class_accuracy import counted, read_confusion
from cps.app.estimate import affordable_epochs
from cps.app.folder_scan import FolderScan, OnProgress
from cps.app.frozen_folder import FrozenFolder, read_features
from cps.app.predict_files import image_format_of
from cps.app.similar_classes import find_similar_images, find_similar_names, typical_outputs
from cps.data.decode import ImageError, ImageFormat
from cps.data.examples import ClassName, as_examples
from cps.data.image_folder import FolderImages, ImageFolder
from cps.data.rotations import Rotations, RotationScheme
from cps.data.tasks import Task
from cps.evaluation.confusion import Confusion
from cps.learner import Learner
from cps.loading import load
from cps.network.outputs import Evidence
from cps.network.pretrained import installed_backbone, load_pretrained
from cps.network.trunk import suggest_trunk
from cps.runtime.environment import reproducibility_context
from cps.selection.base import GrowingSelector, Oracle
from cps.selection.gather import gather_evidence
from cps.selection.predict import predict
from cps.storage import atomic, container
from cps.storage.settings_codec import decode, upgrade_settings
from cps.training.settings import Training

if TYPE_CHECKING:
    from lightning_fabric import Fabric

Content = FolderImages | FrozenFolder  # the images of a folder, or their features


@dataclass(frozen=True)
class LearningPlan:
    """What is about to be learned: the folder, and the learner with its settings.

    `classes` maps the name of each folder to its class, and `known` are the classes that the model knows already: their
    images are added to sums if the task is learned without training (`is_frozen`), on frozen pretrained features, else
    the task learns a new version of them. The `scan` is without the images that were learned before, which are
    `repeated` images. `warning` is text for the user, or "". `learned_as` is the index of the task as which all these
    images were learned before, or None.
    """

    model: Path
    learner: Learner
    scan: FolderScan
    image_format: ImageFormat
    choices: tuple[Choice, ...]
    classes: Mapping[str, ClassName]
    known: frozenset[ClassName] = frozenset()
    is_frozen: bool = False
    warning: str = ""
    repeated: int = 0
    learned_as: int | None = None

    @property
    def rotations(self) -> RotationScheme:
        """The learner's rotations; for a single class all four, since training needs something to tell apart."""
        rotations = self.learner.config.rotations
        needs_rotations = len(self.classes) == 1 and rotations.num_rotations == 1 and not self.is_frozen
        return Rotations(flips=rotations.flips) if needs_rotations else rotations

    @property
    def task_classes(self) -> list[ClassName]:
        """The classes of the new task: all, or only the new ones if the images of the others are added to sums."""
        return [name for name in self.classes.values() if not (self.is_frozen and name in self.known)]


class LearnedFolder(NamedTuple):
    """What was learned from a folder.

    `task` is the index of the new task, or None if there was no new class, and `notes` are the notes about it. `added`
    are the known classes whose sums have grown, with the number of images, and `held_out` the number of images that
    measured the accuracy. `accuracy` is that with the task known and with the task selected, or None. `confusion` is
    about these images alone. `seconds` is the time it took.
    """

    task: int | None
    notes: dict[str, Any]
    added: dict[ClassName, int]
    images: int
    held_out: int
    accuracy: tuple[float, float] | None
    confusion: Confusion
    seconds: float


def make_plan(
    model: str | Path, scan: FolderScan, options: Options, fabric: "Fabric", *, weights: Path | None = None
) -> LearningPlan:
    """Load the model, or choose the settings of a new one."""
    model = Path(model)
    if model.exists():
        learner = load(model, fabric=fabric)
        image_format, warning = image_format_of(learner), ""
        choices, is_frozen = apply_options(options, learner, image_format.size)
    else:
        config = choose_config(scan, options, has_gpu=fabric.device.type == "cuda", installed=installed_backbone())
        choices, is_frozen, warning = config.choices, config.is_frozen, config.warning
        learner = _new_learner(config, fabric, weights)
        image_format = ImageFormat(config.size, learner.architecture.margin if learner.architecture else 0.0)
    plan = LearningPlan(model, learner, scan, image_format, choices, {}, is_frozen=is_frozen, warning=warning)
    new, learned_as = _new_images(scan, learner)
    if learned_as is not None:
        if _checkpoint_header(model, learner) is None:
            atomic.remove(checkpoint_path(model))  # left by a run that was killed after it had saved the model
        return replace(plan, learned_as=learned_as)
    classes, known = _class_names(new, learner)
    plan = replace(plan, scan=new, classes=classes, known=known, repeated=len(scan.files) - len(new.files))
    if len(classes) == 1 and learner.config.trunk is not None:
        return replace(plan, is_frozen=True, choices=(*choices[:2], ONE_CLASS))
    return _within(plan, options.minutes) if options.minutes else plan


def _within(plan: LearningPlan, minutes: float) -> LearningPlan:
    """Return the plan with as many epochs as fit into some minutes, or as those of the run that it resumes."""
    learner, header = plan.learner, _checkpoint_header(plan.model, plan.learner)
    resumed = None if header is None else decode(upgrade_settings(header["identity"]["settings"])["train"])
    if isinstance(resumed, Training):
        epochs = resumed.epochs
    else:
        images, classes = len(plan.scan.files), len(plan.classes)
        epochs = affordable_epochs(learner, plan.image_format.size, images, classes, 60 * minutes)
    limited = limit_epochs(learner, epochs)
    return replace(plan, choices=tuple(limited if each.name == limited.name else each for each in plan.choices))


def _new_images(scan: FolderScan, learner: Learner) -> tuple[FolderScan, int | None]:
    """Return the scan without images that were learned before; if there are no others, also the task of these."""
    digests: dict[str, int] = {}
    for task, subnetwork in enumerate(learner.network.subnetworks):
        if subnetwork.notes.get(keys.SCAN_DIGEST) == scan.digest:
            return scan, task
        for of_class in keys.read_digests(subnetwork.notes).values():
            digests |= dict.fromkeys(of_class, task)
    size = 2 * keys.DIGEST_BYTES
    tasks = [digests.get(digest[:size]) for digest in scan.digests]
    known = [task for task in tasks if task is not None]
    if len(known) == len(tasks):
        return scan, max(known)
    new = {path for path, task in zip(scan.paths, tasks, strict=True) if task is None}
    return (scan.subset(new) if known else scan), None


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


def read_images(plan: LearningPlan, *, skip_damaged: bool = False, on_progress: OnProgress | None = None) -> Content:
    """Decode all images of the folder to the model's image size; for frozen features, keep only their features."""
    scan, activity = plan.scan, "computing features" if plan.is_frozen else "decoding images"

    def report(done: int, total: int) -> None:
        if on_progress is not None:
            on_progress(activity, done, total, "")

    try:
        if plan.is_frozen:
            return read_features(
                plan.learner.network,
                scan.folder,
                scan.files,
                plan.image_format,
                skip_damaged=skip_damaged,
                on_progress=report,
            )
        return ImageFolder(
            scan.folder,
            size=plan.image_format.size,
            margin=plan.image_format.margin,
            files=scan.files,
            skip_damaged=skip_damaged,
            on_progress=report,
        ).read()
    except ImageError as error:
        raise ImageError(f"{error}\nuse --skip-damaged to skip such images" if not skip_damaged else error) from None


def learn_folder(
    plan: LearningPlan, content: Content, *, hold_out: float = 0.1, on_progress: OnProgress | None = None
) -> LearnedFolder:
    """Learn the images of a folder, measure the accuracy on held-out images, and replace the model file.

    New classes become a task. On frozen features, images of known classes are added to sums. The held-out images are
    added to sums, too, once they have measured the accuracy.
    """
    before = content.seconds if isinstance(content, FrozenFolder) else 0.0
    before += (_matching_checkpoint(plan) or {}).get("seconds", 0.0)
    learner, start = plan.learner, time.monotonic() - before
    names = [plan.classes[label] for label in content.labels]
    train, held_out = _split(plan, content, hold_out)
    task = None
    if plan.task_classes:
        new = set(plan.task_classes)
        data = [_select(plan, content, [i for i in part if names[i] in new]) for part in (train, held_out)]
        _learn(plan, Task(plan.task_classes, train=data[0], val=data[1]), on_progress)
        task = len(learner.network.subnetworks) - 1
    _add(plan, content, [index for index in train if plan.is_frozen and names[index] in plan.known])
    outcome = _predict_held_out(plan, content, held_out)
    _add(plan, content, held_out)
    _annotate(plan, content, task, hold_out=held_out, outcome=outcome, seconds=round(time.monotonic() - start, 1))
    learner.save(plan.model)
    atomic.remove(checkpoint_path(plan.model))
    added = Counter(name for name in names if plan.is_frozen and name in plan.known)
    everything = [(subnetwork.classes, {}) for subnetwork in learner.network.subnetworks]
    return LearnedFolder(
        task,
        {} if task is None else dict(learner.network.subnetworks[task].notes),
        dict(added),
        len(names),
        len(held_out),
        outcome.accuracy() if held_out else None,
        read_confusion([*everything, ((), {keys.CONFUSION: counted({}, outcome.true, outcome.selected)})]),
        round(time.monotonic() - start, 1),
    )


class _Outcome(NamedTuple):
    """The classes of held-out images, and those predicted with the task known and with the task selected."""

    true: list[ClassName]
    known: list[Any]
    selected: list[Any]

    def accuracy(self, classes: Container[ClassName] | None = None) -> tuple[float, float]:
        """Return the share of images, all or those of some classes, that were right with the task known and selected.

        Raise `ZeroDivisionError` if there are none.
        """
        rows = [row for row in zip(*self, strict=True) if classes is None or row[0] in classes]
        known, selected = (sum(row[0] == row[column] for row in rows) / len(rows) for column in (1, 2))
        return round(known, 4), round(selected, 4)


def _predict_held_out(plan: LearningPlan, content: Content, held_out: list[int]) -> _Outcome:
    """Predict the held-out images, with their task known and with the task selected among all."""
    if not held_out:
        return _Outcome([], [], [])
    network, selector = plan.learner.network, plan.learner.config.selectors[0]
    true = [plan.classes[content.labels[index]] for index in held_out]
    evidence = _evidence(plan.learner, _select(plan, content, held_out))
    groups = torch.arange(len(held_out), device=network.device)
    selected = predict(network, evidence, selector, groups).classes
    known: list[Any] = [None] * len(true)
    owners = [network.tasks_of(name)[-1] for name in true]
    for task in sorted(set(owners)):
        rows = [row for row, owner in enumerate(owners) if owner == task]
        own = evidence.of_images(torch.tensor(rows))
        found = predict(network, own, Oracle(task), torch.arange(len(rows), device=network.device)).classes
        for row, name in zip(rows, found, strict=True):
            known[row] = name
    return _Outcome(true, known, selected)


def _annotate(
    plan: LearningPlan, content: Content, task: int | None, *, hold_out: list[int], outcome: _Outcome, seconds: float
) -> None:
    """Add notes about a learned folder to its new task, and to the tasks whose sums have grown."""
    learner, network = plan.learner, plan.learner.network
    digest_of = dict(zip(plan.scan.paths, plan.scan.digests, strict=True))
    names = [plan.classes[label] for label in content.labels]
    owners = [network.tasks_of(name)[-1] for name in names]
    is_held_out = set(hold_out)
    for owner in sorted(set(owners)):
        rows = [row for row, of_image in enumerate(owners) if of_image == owner]
        counts = Counter(str(names[row]) for row in rows)
        held_out = [position for position, row in enumerate(hold_out) if owners[row] == owner]
        noted = network.subnetworks[owner].notes
        digests = {name: noted.get(keys.IMAGE_DIGESTS, {}).get(name, "") for name in counts}
        for row in rows:
            digests[str(names[row])] += keys.encode_digests([digest_of[content.paths[row]]])
        true = [outcome.true[position] for position in held_out]
        selected = [outcome.selected[position] for position in held_out]
        notes: dict[str, Any] = {
            keys.CONFUSION: counted(noted.get(keys.CONFUSION), true, selected),
            keys.IMAGE_DIGESTS: {**noted.get(keys.IMAGE_DIGESTS, {}), **digests},
        }
        if owner == task:
            data = _select(plan, content, [row for row in rows if row in is_held_out])
            notes |= {
                keys.DATE: datetime.date.today().isoformat(),
                keys.FOLDER: plan.scan.folder.resolve().name,
                keys.SCAN_DIGEST: plan.scan.digest,
                keys.NUM_IMAGES: counts.total(),
                keys.CLASS_COUNTS: {str(name): counts[str(name)] for name in plan.task_classes},
                keys.NUM_SKIPPED: len(content.skipped),
                keys.NUM_HELD_OUT: len(true),
                keys.ACCURACY: _accuracy_note(outcome, set(true)),
                keys.TYPICAL_OUTPUTS: {} if data is None else typical_outputs(_evidence(learner, data)[owner], true),
                keys.SECONDS: seconds,
                keys.CPS_VERSION: cps.__version__,
                keys.OUTPUTS: outputs_note(learner, owner),
            }
        else:
            addition = {
                keys.DATE: datetime.date.today().isoformat(),
                keys.FOLDER: plan.scan.folder.resolve().name,
                keys.NUM_IMAGES: counts.total(),
                keys.CLASS_COUNTS: dict(counts),
            }
            totals = Counter(noted.get(keys.CLASS_COUNTS, {})) + counts
            notes |= {
                keys.NUM_IMAGES: totals.total(),
                keys.CLASS_COUNTS: dict(totals),
                keys.ADDITIONS: [*noted.get(keys.ADDITIONS, []), addition],
            }
        learner.annotate(owner, **notes)


def _accuracy_note(outcome: _Outcome, classes: Container[ClassName]) -> dict[str, float] | None:
    if not any(name in classes for name in outcome.true):
        return None
    return dict(zip((keys.WITH_TASK_KNOWN, keys.WITH_TASK_SELECTED), outcome.accuracy(classes), strict=True))


def outputs_note(learner: Learner, task: int) -> dict[str, str]:
    """Return the note about the outputs of a task on fixed inputs, with which `cps verify` compares."""
    return {
        keys.OUTPUTS_DIGEST: learner.fingerprint(task).outputs,
        keys.OUTPUTS_CONTEXT: reproducibility_context(learner.network.device),
    }


def _learn(plan: LearningPlan, task: Task, on_progress: OnProgress | None) -> None:
    """Learn a task as planned, with or without training."""
    report = on_progress or (lambda *_: None)
    if plan.is_frozen:
        plan.learner.learn_frozen(task)
        return
    plan.learner.learn(
        task,
        checkpoint=checkpoint_path(plan.model),
        rotations=plan.rotations,
        on_epoch=lambda at: report(at.phase_name, at.done, at.total, f"loss {at.loss:.4f}"),
        new_versions=True,
    )


def _add(plan: LearningPlan, content: Content, indices: list[int]) -> None:
    """Add some of the images to the sums of their classes, if a selector keeps sums."""
    data = _select(plan, content, indices)
    if data is not None and any(isinstance(each, GrowingSelector) for each in plan.learner.config.selectors):
        classes = list(dict.fromkeys(plan.classes[content.labels[index]] for index in indices))
        plan.learner.add(Task(classes, train=data))


def _select(plan: LearningPlan, content: Content, indices: list[int]) -> Any:
    """Return some of the images with their classes as the data of a task, or None if there are none."""
    if not indices:
        return None
    if isinstance(content, FrozenFolder):
        return content.select(indices, plan.classes)
    return content.images[torch.tensor(indices)], [plan.classes[content.labels[index]] for index in indices]


def _evidence(learner: Learner, data: Any) -> Evidence:
    """Return the evidence of the images in the data of a task."""
    examples = as_examples(data, lambda labels: torch.zeros(len(labels), dtype=torch.long))
    return gather_evidence(learner.network, examples, learner.fabric)


def similar_name_warnings(plan: LearningPlan) -> list[str]:
    """Return a warning for each new class whose name differs from another only by case or spaces."""
    learned = [str(name) for subnetwork in plan.learner.network.subnetworks for name in subnetwork.classes]
    new = [str(name) for name in plan.classes.values() if name not in plan.known]
    pairs = find_similar_names(new, learned)
    return [f"class '{name}' has nearly the same name as '{other}'; are they the same class?" for name, other in pairs]


def similar_image_warnings(plan: LearningPlan, content: Content) -> list[str]:
    """Return a warning for each new class whose images resemble a learned class."""
    chosen = [index for index, label in enumerate(content.labels) if plan.classes[label] not in plan.known]
    if not chosen or not plan.learner.network.subnetworks:
        return []

    def evidence_of(indices: list[int]) -> Evidence:
        return _evidence(plan.learner, _select(plan, content, [chosen[index] for index in indices]))

    similar = find_similar_images(plan.learner, evidence_of, [content.labels[index] for index in chosen])
    return [
        f"images of '{name}' resemble class '{other}' of task {task + 1}; if they are the same class, press Ctrl-C and "
        "use one name for both"
        for name, other, task in similar
    ]


def drop_unreadable_classes(plan: LearningPlan, content: Content) -> tuple[LearningPlan, list[str]]:
    """Return the plan without the classes that have no readable image, and the folders of those classes."""
    readable = set(content.labels)
    classes = {folder: name for folder, name in plan.classes.items() if folder in readable}
    return replace(plan, classes=classes), [folder for folder in plan.classes if folder not in readable]


def _class_names(scan: FolderScan, learner: Learner) -> tuple[dict[str, ClassName], frozenset[ClassName]]:
    """Return the class of each folder, and which of these classes the model knows."""
    learned = {_normalise(name): name for each in learner.network.subnetworks for name in each.classes}
    names = {folder: _normalise(folder) for folder in scan.counts}
    if len(set(names.values())) != len(names):
        raise ValueError(f"two folders in '{scan.folder}' have the same class name; rename one of them")
    classes = {folder: learned.get(name, name) for folder, name in names.items()}
    return classes, frozenset(learned[name] for name in names.values() if name in learned)


def _normalise(name: object) -> str:
    """Return a name in Unicode normal form C, so that names that look the same are the same."""
    return unicodedata.normalize("NFC", str(name))


def _split(plan: LearningPlan, content: Content, hold_out: float) -> tuple[list[int], list[int]]:
    """Return the indices of the training images and of the held-out images."""
    readable = plan.scan.subset(set(content.paths))  # hold out images that can be read
    paths = readable.paths
    held_out = {paths[index] for index in readable.held_out(hold_out)}
    train = [index for index, path in enumerate(content.paths) if path not in held_out]
    return train, [index for index, path in enumerate(content.paths) if path in held_out]
