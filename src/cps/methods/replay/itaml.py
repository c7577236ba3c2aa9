"""iTAML: a network from which every task is a few steps away, and a group of images that names the task."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from cps.data.examples import TensorExamples
from cps.method import Assumptions
from cps.methods.blocks.memory import FirstImages, Memory
from cps.methods.replay.per_task_steps import PerTaskSteps
from cps.methods.single_head import SingleHead
from cps.methods.task_training import TaskTraining, phase_shares, with_prefix
from cps.network.classifier import Classifier, Loss
from cps.network.outputs import Outputs
from cps.network.partition import named_tensors
from cps.network.subnetwork import Statistics
from cps.selection.base import Selector
from cps.selection.max_output import MaxOutput
from cps.storage.settings_codec import setting
from cps.training.objective import Objective, Trained
from cps.training.settings import Adam, Constant, RAdam, Steps, Training
from cps.training.steps import Fit

if TYPE_CHECKING:
    from lightning_fabric import Fabric

ADAPTED = "adapted/"  # prefix of the names of buffers


@setting
@dataclass(frozen=True)
class BaseOutput(MaxOutput):
    """The task with the largest output of the base model, averaged over the group; iTAML gives it as features."""

    @property
    def name(self) -> str:
        """The selector's name."""
        return "BaseOutput"

    def score_images(self, evidence: Sequence[Outputs], precomputed: Sequence[Statistics]) -> Tensor:
        """Return the maximum output of each image and task, shape (N, tasks)."""
        return torch.stack([outputs.features.amax(1) for outputs in evidence], dim=1)


@dataclass(eq=False)
class ITAML(SingleHead):
    """Incremental task-agnostic meta-learning (Rajasegaran et al., CVPR 2020).

    In each step, `inner_steps` steps on the images of task i in the batch lead from the parameters P to P_i. Then
    `P <- eta mean_i P_i + (1 - eta) P` with `eta = exp(-beta t / tasks)` for task t of the `tasks` that there will be,
    counted from 0. The loss is the binary cross-entropy of the classes of the image's own task.

    When a task has been learned, a copy of the network is adapted to each task by training with `adapt` on its images
    in memory, not on test images. The base network finds the task of a group of images (`BaseOutput`), and its adapted
    copy the class.

    With `as_released`, the tasks of a batch are trained in sequence, as in the published code: its return to P before
    each task has no effect.
    """

    train: Training = Training(70, RAdam(1e-2), Steps((20, 40, 60), 0.2))
    memory: Memory | None = Memory(2000, choose=FirstImages())
    adapt: Training = Training(1, Adam(1e-3, weight_decay=0.0), Constant(), batch_size=64)
    beta: float = 1.0
    tasks: int = 10
    inner_steps: int = 1
    as_released: bool = False

    positive = ("tasks", "inner_steps")
    name = "iTAML"
    assumes = Assumptions(replay=True, groups=True, adapts=True)

    def __post_init__(self) -> None:
        if self.train.batch_size < 2:
            raise ValueError("iTAML trains on parts of a batch; use batches of 2 images or more")
        super().__post_init__()
        if self.device_fabric.world_size > 1:
            raise ValueError("iTAML trains in one process, since processes may have images of different tasks")

    @property
    def selector(self) -> Selector:
        """The selector for single images."""
        return BaseOutput()

    @property
    def group_selector(self) -> Selector:
        """The selector for groups of images."""
        return BaseOutput()

    @property
    def task_of_class(self) -> Tensor:
        """The task of each class."""
        sizes = torch.tensor([len(classes) for classes in self.classes])
        return torch.arange(len(sizes)).repeat_interleave(sizes).to(self.device)

    def train_task(self, task: TaskTraining) -> None:
        """Train towards the mean of where each task leads."""
        rate = math.exp(-self.beta * task.index / self.tasks)

        def make_steps(fit: Fit, fabric: "Fabric") -> PerTaskSteps:
            settings = {"inner_steps": self.inner_steps, "in_sequence": self.as_released}
            return PerTaskSteps(fit, fabric, self.task_of_class, rate, **settings)

        task.fit(
            self.objective(task),
            self.with_exemplars(task.examples),
            self.train,
            make_steps=make_steps,
            passes_per_batch=self.inner_steps,
            share=self._shares(task)[0],
        )

    def objective(self, task: TaskTraining) -> Trained:
        """Return the binary cross-entropy of the classes of each image's own task."""
        return OwnTaskSigmoids(self.model, self.task_of_class)

    def end_task(self, task: TaskTraining) -> None:
        """Adapt a copy of the network to each task."""
        for index, share in enumerate(self._shares(task)[1:]):
            examples = self._exemplars_of(index)
            if examples is None or len(examples) < 2:  # batch norm needs two
                continue
            adapted = OwnTaskSigmoids(copy.deepcopy(self.model), self.task_of_class)
            task.fit(adapted, examples, self.adapt, phase=f"adaptation to task {index}", share=share)
            for name, value in named_tensors(adapted.student).items():
                self.buffers[f"{ADAPTED}{index}/{name}"] = value.detach()

    def _exemplars_of(self, task: int) -> TensorExamples | None:
        """Return the images in memory of the classes of a task."""
        examples = self.exemplars.examples()
        if examples is None:
            return None
        own = self.task_of_class.to(examples.targets.device)[examples.targets] == task
        return TensorExamples(examples.images[own], examples.targets[own])

    def _shares(self, task: TaskTraining) -> list[float]:
        """Return the shares of a budget: that of the training, and that of the adaptation to each task."""
        kept = 0 if self.memory is None or not task.old else task.old * self.memory.quota(task.old)
        training = (self.train, self.inner_steps * (len(task.examples) + kept))
        return phase_shares(training, *((self.adapt, self.quota * len(classes)) for classes in self.classes))

    def outputs_by_task(self, batches: Sequence[Tensor]) -> list[Outputs]:
        """Return for each task the outputs of the base network as features, those of its adapted copy as logits."""
        _, base = self.outputs(batches)
        return [Outputs(own, self._adapted(task, batches, own)) for task, own in enumerate(self.split_by_task(base))]

    @torch.no_grad()
    def _adapted(self, task: int, batches: Sequence[Tensor], base: Tensor) -> Tensor:
        """Return the scores of the classes of a task by its adapted copy, or those of the base network without one."""
        tensors = with_prefix(f"{ADAPTED}{task}/", self.buffers)
        if not tensors:
            return base
        model = self.model.eval()
        parts = [functional_call(model, tensors, self.prepare(images.to(self.device))) for images in batches]
        return self.split_by_task(torch.cat(parts).float())[task]

    def kept(self, *, learning: bool = False) -> dict[str, int]:
        """Return the bytes kept, by what they are; the adapted copies could be made again from the memory."""
        sizes = super().kept(learning=learning)
        if "statistics" in sizes:
            sizes["adapted copies"] = sizes.pop("statistics")
        return sizes


class OwnTaskSigmoids(Objective):
    """The mean binary cross-entropy over images and the classes of each image's own task."""

    def __init__(self, student: Classifier, task_of_class: Tensor):
        super().__init__(student)
        self.student: Classifier
        self.task_of_class = task_of_class

    def forward(self, pixels: Tensor, labels: Tensor, loss: Loss) -> Tensor:
        """Return the loss of a batch; that of the training settings is not used."""
        logits = self.student(pixels).float()
        targets = F.one_hot(labels, logits.shape[1]).to(logits.dtype)
        own = self.task_of_class[labels, None] == self.task_of_class  # (N, classes)
        losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        return (losses * own).sum() / own.sum()
