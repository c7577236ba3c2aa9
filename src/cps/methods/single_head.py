"""The frame of methods with one network and one head for the classes of all tasks.

A method says what it minimises and what it keeps. Growing the head, checks, checkpoints, files, predictions and the
accounts of bytes and image passes are the same for all of them. Without more, the frame is finetuning.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cps.config import check_callback
from cps.data.examples import ClassName, Examples, as_examples, iterate_batches, join_examples
from cps.data.images import as_images
from cps.data.tasks import Task
from cps.methods.blocks.heads import exemplar_means, grow_linear, nearest_mean_scores
from cps.methods.blocks.memory import Exemplars, Memory
from cps.methods.blocks.task_checks import check_classes, check_counts, check_shape
from cps.methods.blocks.trunk_maps import TrunkMaps
from cps.methods.task_training import PhaseProgress, TaskTraining, with_prefix
from cps.methods.trained_method import BATCH, CHOOSE, HEAD, KIND, TrainedMethod
from cps.network.classifier import Classifier, make_head
from cps.network.freezing import Guard
from cps.network.outputs import Evidence, Outputs
from cps.network.partition import named_tensors
from cps.network.subnetwork import Statistics, local_labels
from cps.network.trunk import split_backbone
from cps.runtime.devices import on_rank_zero
from cps.runtime.seeding import generator
from cps.selection.base import Selector
from cps.selection.max_output import MaxOutput
from cps.selection.softmax_mass import SoftmaxMass
from cps.storage import container
from cps.storage.container import FileError
from cps.training.objective import Trained


class State(NamedTuple):
    """Everything that learning a task changes: the classes of each task, the shape of images, and named tensors."""

    classes: list[tuple[ClassName, ...]]
    input_shape: tuple[int, ...] | None
    image_passes: int
    tensors: dict[str, Tensor]


@dataclass(eq=False)
class SingleHead(TrainedMethod):
    """One network that is trained on one task after the other, with a head that grows by the classes of each.

    The settings are those of `TrainedMethod`. `memory` says how many images of each class are kept when it has been
    learned. With `nearest_mean`, an image gets the class whose images in memory have the nearest mean, instead of that
    with the largest logit. `trunk` names the layer of a pretrained backbone behind which training begins, and
    `map_copies` is the number of copies of an image, itself and augmented ones, that pass the layers up to it once.

    A method overrides `objective` and `guard`, or `train_task` if it has several phases. What it keeps between tasks,
    besides the model, is in `buffers`, tensors by name.
    """

    _: KW_ONLY
    memory: Memory | None = None
    nearest_mean: bool = False
    trunk: str | None = None
    map_copies: int = 8

    name = "finetuning"
    has_teacher = False  # while it learns, from the second task on
    least_quota = 0  # the least number of images of each class in its memory

    def __post_init__(self) -> None:
        super().__post_init__()
        self.assumes = replace(self.assumes, replay=self.memory is not None)
        self.input_shape: tuple[int, ...] | None = None
        self.buffers: dict[str, Tensor] = {}
        self.exemplars = Exemplars()
        self._tail = self.backbone  # what is trained of it
        if self.trunk is not None:
            trunk, self._tail = split_backbone(self.backbone, self.trunk)
            self.maps = TrunkMaps(trunk, self.prepare, self.augment, self.map_copies, self.seed, self.device)
            self.prepare = self.maps
        self.model = self._new_model()

    def _new_model(self) -> Classifier:
        """Return the model before the first task, which replaces its head."""
        return Classifier(self.new_backbone(), make_head(1, 1, generator(self.seed))).to(self.device)

    def new_backbone(self) -> nn.Module:
        """Return the backbone of the model: a copy of the given one, or of what follows its trunk."""
        return copy.deepcopy(self._tail)

    @property
    def selector(self) -> Selector:
        """The selector for single images: with it, an image gets the class with the largest score of all."""
        return MaxOutput()

    @property
    def group_selector(self) -> Selector:
        """The selector for groups of images; distances to means are no logits, so they have no softmax."""
        return MaxOutput() if self.nearest_mean else SoftmaxMass()

    def learn(
        self,
        task: Task,
        *,
        checkpoint: str | Path | None = None,
        on_epoch: Callable[[PhaseProgress], None] | None = None,
    ) -> None:
        """Learn the classes of a task. If anything fails, the method is as it was before.

        With `checkpoint`, the state is saved to that file after each epoch, and a call that finds the file resumes from
        it. `on_epoch` replaces that of the method for this task.
        """
        self._learn([task], checkpoint, on_epoch)

    def _learn(
        self,
        tasks: Sequence[Task],
        checkpoint: str | Path | None = None,
        on_epoch: Callable[[PhaseProgress], None] | None = None,
    ) -> None:
        """Learn one task, or several at once."""
        check_callback("on_epoch", on_epoch)
        before = self.state()
        try:
            with torch.inference_mode(False), torch.enable_grad():
                examples = join_examples(*[self._begin(task) for task in tasks])
                self._check_memory()
                new = sum(len(task.classes) for task in tasks)
                training = TaskTraining(self, examples, new, on_epoch or self.on_epoch, checkpoint)
                self.train_task(training)
                self.exemplars = self.choose_exemplars(training)
                if self.maps is not None:
                    self.maps.keep(self.exemplars.images)
                if self.nearest_mean:
                    self.buffers["means"] = exemplar_means(self)
                self.end_task(training)
        except BaseException:
            self.restore(before)
            raise

    def _begin(self, task: Task) -> Examples:
        """Check a task, grow the model by its classes, and return its examples, labelled among all classes."""
        classes, first = check_classes(task, self.classes), self.num_classes
        examples = as_examples(task.train, lambda labels: first + local_labels(classes, labels), workers=self.workers)
        labels = examples.labels()
        if labels is not None:
            check_counts(classes, torch.bincount(labels.cpu() - first, minlength=len(classes)))
        images, _ = next(examples.batches([torch.arange(min(2, len(examples)))]))
        check_shape(images, self.input_shape)
        self.input_shape = tuple(images.shape[1:])
        self._grow(classes)
        return examples

    def train_task(self, task: TaskTraining) -> None:
        """Train the model on the images of a task and those of the memory."""
        task.fit(self.objective(task), self.with_exemplars(task.examples), self.train, guard=self.guard(task))

    def objective(self, task: TaskTraining) -> Trained:
        """Return what training minimises: by default the loss of the training settings over all classes."""
        return self.model

    def guard(self, task: TaskTraining) -> Guard | None:
        """Return what training must not move, by the names of the objective's student: by default nothing."""
        return None

    @property
    def quota(self) -> int:
        """The number of images of each class that the memory has room for."""
        return 0 if self.memory is None else self.memory.quota(self.num_classes)

    def _check_memory(self) -> None:
        """Raise `ValueError` before the training for a memory that is too small."""
        least = max(self.least_quota, int(self.nearest_mean))
        if self.quota < least:
            raise ValueError(
                f"{self.name} needs a memory for at least {least} of the images of each class, got one for "
                f"{self.quota} of each of {self.num_classes} classes; use a larger memory"
            )

    def choose_exemplars(self, task: TaskTraining, examples: Examples | None = None) -> Exemplars:
        """Return as many images of every class as the memory has room for.

        Those of new classes are chosen from `examples`, by default all of the task.
        """
        examples = task.examples if examples is None else examples
        chosen, quota = self.exemplars.first(task.old), self.quota
        chosen.shrink(quota)
        if self.memory is not None and quota:
            draws = task.generator(CHOOSE)
            choose, features = self.memory.choose, partial(self.features_of, examples)
            chosen.add_classes(examples, task.labels.tolist(), quota, choose, features, draws)
        return chosen

    def end_task(self, task: TaskTraining) -> None:
        """Compute what the method keeps about a task, or needs to predict, from its images and the memory."""

    def with_exemplars(self, examples: Examples) -> Examples:
        """Return examples together with the images in memory."""
        return join_examples(examples, self.exemplars.examples())

    def evidence(self, images: Any) -> Evidence:
        """Return features (N, d) and the scores of the classes of each task for the images."""
        if not self.classes:
            raise RuntimeError("nothing has been learned yet; call learn(task) first")
        pixels = as_images(images)
        check_shape(pixels, self.input_shape)
        return Evidence.of(self.outputs_by_task(pixels.split(BATCH)))

    def outputs_by_task(self, batches: Sequence[Tensor]) -> list[Outputs]:
        """Return the outputs of each task for batches of raw images: the features, and its part of the scores."""
        features, scores = self.outputs(batches)
        return [Outputs(features, part) for part in self.split_by_task(scores)]

    def split_by_task(self, scores: Tensor) -> tuple[Tensor, ...]:
        """Return the scores (N, classes) of the classes of each task."""
        return scores.split([len(classes) for classes in self.classes], dim=1)

    def statistics(self, selector: str) -> list[Statistics]:
        """Return nothing for each task: no selector keeps statistics."""
        return [{} for _ in self.classes]

    def outputs(self, batches: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
        """Return features (N, d) and scores (N, classes) of batches of raw images."""
        features = self.features(batches)
        return features, self.scores(features).float()

    @torch.no_grad()
    def features(self, batches: Iterable[Tensor]) -> Tensor:
        """Return the features (N, d) of batches of raw images."""
        backbone = self.model.backbone.eval()
        return torch.cat([backbone(self.prepare(images.to(self.device))) for images in batches])

    @torch.no_grad()
    def scores(self, features: Tensor) -> Tensor:
        """Return the scores (N, classes) of features: logits, or how near the means are."""
        return nearest_mean_scores(features, self.buffers["means"]) if self.nearest_mean else self.logits(features)

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits (N, classes) of features: by default those of the head."""
        return self.model.head(features.to(self.model.head.weight.dtype))

    def features_of(self, examples: Examples, *, flipped: bool = False) -> Tensor:
        """Return the features (N, d) of examples, or of their mirror images."""
        return self.features(images.flip(-1) if flipped else images for images, _ in iterate_batches(examples))

    def kept(self, *, learning: bool = False) -> dict[str, int]:
        """Return the bytes kept between tasks, or while a task is learned, by what they are."""
        sizes = {"weights": sum(value.nbytes for value in named_tensors(self.model).values())}
        if len(self.exemplars):
            sizes["exemplars"] = self.exemplars.nbytes
        if self.buffers:
            sizes["statistics"] = sum(value.nbytes for value in self.buffers.values())
        if learning and self.has_teacher:
            sizes["teacher"] = sizes["weights"]
        if self.maps is not None:
            sizes["weights"] += self.maps.nbytes
        return sizes

    def describe(self) -> dict[str, Any]:
        """Return the name, the settings and a digest of the trunk as JSON data."""
        about = super().describe()
        if self.maps is not None:
            about["settings"]["weights of the trunk"] = self.maps.digest
        return about

    def state(self) -> State:
        """Return a copy of everything that learning a task changes."""
        tensors = {name: value.detach().clone() for name, value in self.tensors().items()}
        return State(list(self.classes), self.input_shape, self.trainer.image_passes, tensors)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors that are kept between tasks, by name."""
        model = {f"model/{name}": value for name, value in named_tensors(self.model).items()}
        buffers = {f"buffer/{name}": value for name, value in self.buffers.items()}
        return model | buffers | {f"exemplars/{name}": images for name, images in self.exemplars.state().items()}

    def restore(self, state: State) -> None:
        """Return to a state."""
        if [*self.classes] != state.classes:
            self.classes = []
            self.model = self._new_model()
            self.input_shape = state.input_shape
            for classes in state.classes:
                self._grow(classes)
        self.input_shape, self.trainer.image_passes = state.input_shape, state.image_passes
        self.set_tensors(state.tensors)

    @torch.no_grad()
    def set_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `tensors` returned."""
        for name, value in named_tensors(self.model).items():
            value.copy_(tensors[f"model/{name}"])
        buffers = with_prefix("buffer/", tensors)
        self.buffers = {name: value.to(self.device).clone() for name, value in buffers.items()}
        self.exemplars.restore(with_prefix("exemplars/", tensors))

    def save(self, path: str | Path) -> None:
        """Write everything learned to a file. A previous file stays intact until the new one is complete on disk."""
        header = {**self.describe(), "classes": [list(classes) for classes in self.classes]}
        header |= {"input_shape": list(self.input_shape or ()), "image_passes": self.image_passes}
        on_rank_zero(self.device_fabric, lambda: container.write(path, KIND, header, self.tensors()))

    def load(self, path: str | Path) -> None:
        """Continue from a file that `save` wrote; raise `ValueError` if its method has other settings."""
        header, tensors = self.read_file(path)
        try:
            classes = [tuple(names) for names in header["classes"]]
            shape = tuple(header["input_shape"]) or None
            self.restore(State(classes, shape, int(header["image_passes"]), tensors))
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise FileError(f"'{path}' does not fit this method: {error}") from error

    def _grow(self, classes: tuple[ClassName, ...]) -> None:
        """Make room for the classes of a task."""
        draws = generator(self.seed, len(self.classes), HEAD)
        self.classes.append(classes)
        self.grow_model(len(classes), draws)
        self.model.to(self.device)

    def grow_model(self, outputs: int, draws: torch.Generator) -> None:
        """Add outputs for new classes to the model."""
        head = self.model.head if len(self.classes) > 1 else None
        self.model.head = grow_linear(head, self.num_features, outputs, draws)

    @property
    def num_features(self) -> int:
        """The number of features of the backbone."""
        assert self.input_shape is not None
        with torch.no_grad():
            blank = self.prepare(torch.zeros(1, *self.input_shape, device=self.device))
            return int(self.model.backbone.eval()(blank).shape[1])
