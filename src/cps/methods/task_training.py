"""The training of one task by a method, in one phase or several, which can be interrupted after any epoch."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cps.data.batch_transform import BatchTransform
from cps.data.examples import Examples
from cps.network.freezing import Guard
from cps.network.partition import named_tensors, set_tensors
from cps.runtime.devices import precision_of
from cps.runtime.seeding import generator
from cps.training.checkpoint import Checkpoint, Position, Saved
from cps.training.objective import Trained
from cps.training.settings import Training, scale_epochs
from cps.training.steps import MakeSteps
from cps.training.trainer import Epoch

if TYPE_CHECKING:
    from cps.methods.trained_method import TrainedMethod

START, NOW = "start/", "now/"  # prefixes in a checkpoint: the method when the phase began, and what is trained
PASSES = "image passes"


@dataclass(frozen=True)
class PhaseProgress:
    """The state of learning a task after an epoch.

    `task` counts from 0, `phase_name` is the name of the phase, and `epoch` of `epochs` are finished in it. While a
    trunk computes maps these are numbers of images, and there is no loss.
    """

    task: int
    phase_name: str
    epoch: int
    epochs: int
    loss: float | None


class TaskTraining:
    """The task that a method learns, and the phases of its training.

    `examples` are its training images, labelled by their index among all classes, of which `old` are those of earlier
    tasks and `new` those of this one. `held_out` are the images of `task.val`, or None.
    """

    def __init__(
        self,
        method: "TrainedMethod",
        examples: Examples,
        new: int,
        on_epoch: Callable[[PhaseProgress], None] | None,
        checkpoint: str | Path | None,
        held_out: Examples | None = None,
    ):
        self.method, self.examples, self.held_out = method, examples, held_out
        self.index = len(method.classes) - 1
        self.new, self.old = new, method.num_classes - new
        self._on_epoch = on_epoch
        self._phase = 0
        self._saver = None if checkpoint is None else Checkpoint(Path(checkpoint), self._identity())
        self._saved: Saved | None = self._saver and self._saver.load()

    @property
    def labels(self) -> Tensor:
        """The labels of the new classes."""
        return torch.arange(self.old, self.old + self.new)

    def generator(self, *purpose: int) -> torch.Generator:
        """Return a random generator for a purpose in this task."""
        return generator(self.method.seed, self.index, *purpose)

    def fit(
        self,
        model: Trained,
        examples: Examples,
        training: Training,
        *,
        phase: str = "training",
        share: float = 1.0,
        guard: Guard | None = None,
        transform: BatchTransform | None = None,
        make_steps: MakeSteps | None = None,
        passes_per_batch: int = 1,
    ) -> bool:
        """Train a model or an objective for a phase of the task, or resume the phase that was interrupted.

        If the method has a number of `passes`, the phase takes the given share of them. `passes_per_batch` says how
        often its training steps use each image of a batch. Return False if the phase was finished before the
        interruption, and so was what is done between it and the next phase.
        """
        method, index = self.method, self._phase
        self._phase += 1
        if self._saved is not None and index < self._saved.position.phase:
            if index == self._saved.position.phase - 1:
                self._return_to_start(self._saved)
            return False
        saved, self._saved = self._saved, None
        images = None if method.passes is None else round(share * method.passes * len(self.examples))
        epochs = training.epochs if images is None else images / (passes_per_batch * len(examples))
        training = scale_epochs(training, epochs / max(training.epochs, 1))
        if method.maps is not None:
            examples = method.maps.examples(examples, self._report_maps)
            transform = method.maps.transform(transform or method.transform)
        start = self._start_state() if self._saver is not None else {}
        if saved is not None:
            set_tensors(model, with_prefix(NOW, saved.tensors))

        def state() -> dict[str, Tensor]:
            return {**start, **{f"{NOW}{name}": value for name, value in named_tensors(model).items()}}

        def after_epoch(epoch: Epoch) -> None:
            if self._saver is not None and method.device_fabric.is_global_zero:
                self._saver.save(state, epoch.optimizer_state, Position(index, epoch.done))
            if self._on_epoch is not None:
                self._on_epoch(PhaseProgress(self.index, phase, epoch.done, math.ceil(epochs), epoch.loss))

        method.trainer.fit(
            model,
            examples,
            training,
            seed=(method.seed, self.index, index),
            transform=transform or method.transform,
            guard=guard,
            after_epoch=after_epoch,
            start=saved.position.epoch if saved else 0,
            optimizer_state=saved.optimizer if saved else None,
            images=images,
            make_steps=make_steps,
            passes_per_batch=passes_per_batch,
        )
        return True

    def _report_maps(self, done: int, images: int) -> None:
        if self._on_epoch is not None:
            self._on_epoch(PhaseProgress(self.index, "maps of the trunk", done, images, None))

    def _start_state(self) -> dict[str, Tensor]:
        """Return a copy of the method's state at the start of a phase."""
        passes = torch.tensor(self.method.image_passes)
        tensors = {f"{START}{name}": value.detach().clone() for name, value in self.method.tensors().items()}
        return {**tensors, PASSES: passes}

    def _return_to_start(self, saved: Saved) -> None:
        """Give the method the state that it had at the start of the phase that was interrupted."""
        self.method.set_tensors(with_prefix(START, saved.tensors))
        self.method.trainer.image_passes = int(saved.tensors[PASSES])

    def _identity(self) -> dict[str, Any]:
        """Return what a checkpoint must have in common with this training, as JSON data."""
        method = self.method
        about = method.describe()
        return {
            "method": about["method"],
            "method settings": about["settings"],
            "task": self.index,
            "classes": [list(classes) for classes in method.classes],
            "images": len(self.examples),
            "pixels and labels": self.examples.digest(),
            "earlier tasks": method.digest(),
            "processes": method.device_fabric.world_size,
            "precision": precision_of(method.device_fabric),
        }


def phase_shares(*phases: tuple[Training, int]) -> list[float]:
    """Return the share that each phase, a training and its number of images, has in the image passes of all."""
    passes = [training.epochs * images for training, images in phases]
    return [part / max(sum(passes), 1) for part in passes]


def with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names start with a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
