"""Growing: a model file learns a shipment of new classes, and is replaced only when all is done.

Beside the model lie, while it learns, a checkpoint that the same call goes on from, and a lock. Nothing else is kept,
no image least of all.
"""

import datetime
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

import cps
from cps.app.autoconfig import Choice, Options, apply, propose
from cps.app.class_names import almost_alike, new_version, one_form
from cps.app.folder_scan import FolderScan, Watch
from cps.app.predict_files import size_of
from cps.app.similar_classes import lookalikes, usual_outputs
from cps.config import SETTINGS
from cps.data.datasets import imagenet_weights
from cps.data.decode import ImageError
from cps.data.image_folder import FolderImages, ImageFolder
from cps.data.rotations import Rotations, RotationScheme
from cps.data.tasks import Task
from cps.learner import Learner
from cps.loading import load
from cps.runtime.environment import reproducibility_context
from cps.storage import container as storage
from cps.storage.settings_codec import encode

if TYPE_CHECKING:
    from lightning_fabric import Fabric


@dataclass(frozen=True)
class LearningPlan:
    """A model that is about to learn a shipment: its learner, the image size, its settings in words, class names.

    `names` maps the name of a folder to that of its class, which differ where a known class gets a new version. `done`
    is the task that these very images were learned as, if they were.
    """

    model: Path
    learner: Learner
    shipment: FolderScan
    size: int
    choices: tuple[Choice, ...]
    names: Mapping[str, str]
    done: int | None = None

    @property
    def rotations(self) -> RotationScheme:
        """How the new classes are looked at: as all others; one by itself in its turns, to have something to tell."""
        usual = self.learner.rotations
        is_alone = len(self.names) == 1 and usual.num_rotations == 1
        return Rotations(flips=usual.flips) if is_alone else usual


class Learned(NamedTuple):
    """What came of it: the task's place from 0, and its notes."""

    task: int
    notes: dict[str, Any]


def prepare(
    model: str | Path,
    shipment: FolderScan,
    wishes: Options,
    fabric: "Fabric",
    *,
    weights: Path | None = None,
    as_version: bool = False,
) -> LearningPlan:
    """Open a model, or choose the settings of a new one, for a shipment; refuse classes that it knows."""
    model = Path(model)
    if model.exists():
        learner = load(model, fabric=fabric)
        size = size_of(learner)
        choices = apply(wishes, learner, size)
    else:
        proposal = propose(shipment, wishes, has_gpu=fabric.device.type == "cuda")
        size, choices = proposal.size, proposal.choices
        backbone = proposal.backbone.drawn(wishes.seed or 0)
        if wishes.pretrained:
            imagenet_weights(backbone, weights)
        learner = Learner(backbone, **proposal.settings, fabric=fabric)
        learner.builtin = proposal.backbone  # so that the file opens without code
    for task, subnetwork in enumerate(learner.network.subnetworks):
        if subnetwork.notes.get("shipment") == shipment.digest:
            if _pending(model, learner) is None:
                storage.remove(checkpoint_of(model))  # a kill may have come just before
            return LearningPlan(model, learner, shipment, size, choices, {}, done=task)
    return LearningPlan(model, learner, shipment, size, choices, _new_names(shipment, learner, as_version))


def checkpoint_of(model: str | Path) -> Path:
    """Return where learning keeps its checkpoint: beside the model."""
    return Path(f"{model}.checkpoint")


def goes_on(growth: LearningPlan) -> bool:
    """Say whether an interrupted run of the same classes and settings left a checkpoint to go on from."""
    return _left_over(growth) is not None


def _left_over(growth: LearningPlan) -> dict[str, Any] | None:
    """Return the header of that checkpoint."""
    found = _pending(growth.model, growth.learner)
    if found is None:
        return None
    settings = {name: encode(getattr(growth.learner, name)) for name in SETTINGS} | {
        "rotations": encode(growth.rotations)
    }
    known = {name: value for name, value in found["identity"]["settings"].items() if name in settings}
    is_same = found["identity"]["classes"] == list(growth.names.values()) and known == settings
    return found if is_same else None


def _pending(model: str | Path, learner: Learner) -> dict[str, Any] | None:
    """Return the header of the checkpoint beside a model, if that is of what is still to be learned."""
    try:
        found = storage.read_header(checkpoint_of(model), "checkpoint")
    except (FileNotFoundError, storage.FileError):
        return None
    return found if found["identity"].get("task") == len(learner.network.subnetworks) else None


def decode(growth: LearningPlan, *, skip_damaged: bool = False, watch: Watch | None = None) -> FolderImages:
    """Decode all images of the shipment to the model's size."""
    shipment = growth.shipment

    def tell(done: int, total: int) -> None:
        if watch is not None:
            watch("decoding images", done, total, "")

    folder = ImageFolder(shipment.folder, size=growth.size, files=shipment.files, skip_damaged=skip_damaged, watch=tell)
    try:
        return folder.read()
    except ImageError as error:
        raise ImageError(f"{error}\n--skip-damaged leaves such images out" if not skip_damaged else error) from None


def learn(growth: LearningPlan, read: FolderImages, *, share: float = 0.1, watch: Watch | None = None) -> Learned:
    """Learn the decoded images as a task, measure it on those held out, and put the new model in place of the old."""
    began = time.monotonic() - (_left_over(growth) or {}).get("seconds", 0.0)
    learner, names = growth.learner, growth.names
    train, held = _split(growth.shipment, read, names, share)
    checkpoint = checkpoint_of(growth.model)
    new = Task(list(names.values()), train=train, val=held if held[1] else None)
    usual = learner.rotations, learner.watch
    learner.watch = watch and (lambda at: watch(at.words, at.done, at.total, f"loss {at.loss:.4f}"))
    learner.rotations = growth.rotations
    try:
        subnetwork = learner.learn(new, checkpoint=checkpoint)
    finally:
        learner.rotations, learner.watch = usual
    task = len(learner.network.subnetworks) - 1
    counts = Counter(train[1] + held[1])
    subnetwork.notes.update(
        {
            "day": datetime.date.today().isoformat(),
            "folder": growth.shipment.folder.resolve().name,
            "shipment": growth.shipment.digest,
            "images": counts.total(),
            "classes": {name: counts[name] for name in names.values()},
            "skipped": len(read.skipped),
            "held out": len(held[1]),
            "accuracy": _accuracy(learner, task, *held),
            "usual output": usual_outputs(learner, task, *held) if held[1] else {},
            "seconds": round(time.monotonic() - began, 1),
            "cps": cps.__version__,
            "answers": {
                "digest": learner.fingerprint(task).outputs,
                "on": reproducibility_context(learner.network.device),
            },
        }
    )
    learner.save(growth.model)
    storage.remove(checkpoint)
    return Learned(task, subnetwork.notes)


def known_classes(growth: LearningPlan, read: FolderImages) -> list[str]:
    """Return a warning for each new class that looks like a known one; a new version of one is meant to."""
    new = {folder for folder, name in growth.names.items() if one_form(folder) == name}
    chosen = [index for index, label in enumerate(read.labels) if label in new]
    return lookalikes(growth.learner, read.images[chosen], [read.labels[index] for index in chosen]) if chosen else []


def _new_names(shipment: FolderScan, learner: Learner, as_version: bool) -> dict[str, str]:
    """Return the class of each folder; a known name is refused, or counted up."""
    known = {one_form(name): task for task, sub in enumerate(learner.network.subnetworks) for name in sub.classes}
    names = {}
    for folder in shipment.counts:
        name = one_form(folder)
        if name in known and not as_version:
            raise ValueError(
                f"class '{name}' was learned already, in task {known[name] + 1}; give its folder another name, or add "
                f"--as-version to learn it as '{new_version(name, {*known})}'"
            )
        names[folder] = new_version(name, {*known, *names.values()}) if name in known else name
    if len(set(names.values())) != len(names):
        raise ValueError(f"two folders of '{shipment.folder}' would become one class; rename one of them")
    return names


def namesakes(growth: LearningPlan) -> list[str]:
    """Return a warning for each new class whose name differs from another's by letter case or blanks alone."""
    learned = [str(name) for sub in growth.learner.network.subnetworks for name in sub.classes]
    pairs = almost_alike(list(growth.names.values()), learned)
    return [f"class '{name}' is called almost like '{other}'; is it the same?" for name, other in pairs]


def without_unreadable(growth: LearningPlan, read: FolderImages) -> tuple[LearningPlan, list[str]]:
    """Return the growth without classes of which no image could be read, and the folders of those."""
    readable = set(read.labels)
    names = {folder: name for folder, name in growth.names.items() if folder in readable}
    return replace(growth, names=names), [folder for folder in growth.names if folder not in readable]


Part = tuple[Tensor, list[str]]  # images and the class of each


def _split(shipment: FolderScan, read: FolderImages, names: Mapping[str, str], share: float) -> tuple[Part, Part]:
    """Return the images to learn from, and those held out."""
    shipment = shipment.only(set(read.paths))
    paths, held_out = shipment.paths, shipment.held_out(share)
    held = {paths[index] for index in held_out}
    parts = []
    for wanted in (False, True):
        places = [index for index, path in enumerate(read.paths) if (path in held) == wanted]
        images = read.images[torch.tensor(places, dtype=torch.long)]
        parts.append((images, [names[read.labels[index]] for index in places]))
    return parts[0], parts[1]


def _accuracy(learner: Learner, task: int, images: Tensor, labels: list[str]) -> dict[str, float] | None:
    """Return the share of held-out images that are right, with the task known and with it to be found among all."""
    if not labels:
        return None

    def right(found: list[Any]) -> float:
        return round(sum(a == b for a, b in zip(found, labels, strict=True)) / len(labels), 4)

    return {
        "task known": right(learner.predict(images, task=task).classes),
        "task found": right(learner.predict(images).classes),
    }
