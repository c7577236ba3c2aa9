"""FOSTER: a second feature extractor learns what the first one lacks, then both are distilled into one."""

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cps.data.examples import read_labels
from cps.method import Assumptions
from cps.methods.blocks.distillation import distillation_loss
from cps.methods.blocks.heads import widen_linear
from cps.methods.blocks.memory import Memory
from cps.methods.blocks.teacher import Frozen, Teacher
from cps.methods.expansion.class_weights import effective_number_weights
from cps.methods.expansion.columns import Columns
from cps.methods.single_head import SingleHead
from cps.methods.task_training import TaskTraining, phase_shares
from cps.network.classifier import Classifier, Loss, make_head
from cps.training.objective import Objective
from cps.training.settings import SGD, Cosine, Training

BOOSTED_HEAD, ENHANCEMENT = 1060, 1061  # purposes of a seed


@dataclass(eq=False)
class FOSTER(SingleHead):
    """Feature boosting and compression (Wang et al., ECCV 2022); predictions are those of the compressed network.

    From the second task on, a copy of the feature extractor is trained beside the frozen one (`train`). Its loss is the
    cross-entropy of one head on both features, whose logits are divided by weights of the classes, plus that of a head
    on the new features alone, plus `strength` times the distillation of old classes by the frozen network. Then the
    old extractor and head are trained to give the outputs of both (`compress`), whose probabilities are multiplied by
    weights of the classes. The weights are those of effective numbers of images, with `boost_beta` and `compress_beta`;
    the published runs lower `boost_beta` from 0.98 to 0.94 over ten tasks. `first` is the training of the first task.
    """

    first: Training = Training(200, SGD(0.1, weight_decay=5e-4), Cosine())
    train: Training = Training(170, SGD(0.1, weight_decay=5e-4), Cosine())
    compress: Training = Training(130, SGD(0.1, weight_decay=0.0), Cosine())
    memory: Memory | None = Memory(2000)
    boost_beta: float = 0.96
    compress_beta: float = 0.97
    temperature: float = 2.0
    strength: float = 1.0

    least_quota = 1
    positive = ("temperature",)
    name = "FOSTER"
    assumes = Assumptions(replay=True)

    def train_task(self, task: TaskTraining) -> None:
        """Train the first task; for others, train a second extractor, then distil both into one."""
        examples = self.with_exemplars(task.examples)
        if task.old == 0:
            task.fit(self.model, examples, self.first)
            return
        counts = torch.bincount(read_labels(examples).cpu(), minlength=self.num_classes).tolist()
        shares = phase_shares((self.train, len(examples)), (self.compress, len(examples)))
        boosting = self._boosting(task, effective_number_weights(counts, self.boost_beta))
        task.fit(boosting, examples, self.train, phase="boosting", share=shares[0])
        weights = effective_number_weights(counts, self.compress_beta).to(self.device)
        compression = CompressionLoss(self.model, Frozen(boosting.student), weights, self.temperature)
        task.fit(compression, examples, self.compress, phase="compression", share=shares[1])

    def _boosting(self, task: TaskTraining, weights: Tensor) -> "BoostingLoss":
        """Return the loss of two extractors side by side."""
        columns, features = Columns(copy.deepcopy(self.model.backbone)), self.num_features
        columns.add()
        head = widen_linear(self.model.head, 2 * features, task.generator(BOOSTED_HEAD))
        enhancement = make_head(features, self.num_classes, task.generator(ENHANCEMENT)).to(self.device)
        teacher = Teacher(self.model.head)
        return BoostingLoss(
            Classifier(columns, head), enhancement, teacher, task.old, weights.to(self.device), self.temperature,
            self.strength,
        )  # fmt: skip

    def kept(self, *, learning: bool = False) -> dict[str, int]:
        """Return the bytes kept between tasks, or while a task is learned, by what they are."""
        sizes = super().kept(learning=learning)
        return {**sizes, "two extractors": 2 * sizes["weights"]} if learning else sizes


class BoostingLoss(Objective):
    """The loss of two extractors: with balanced logits, of the new features alone, and the distillation of old classes.

    `teacher` is the head on the features of the first extractor, which is frozen.
    """

    weights: Tensor

    def __init__(
        self,
        student: Classifier,
        enhancement: nn.Linear,
        teacher: Teacher,
        old: int,
        weights: Tensor,
        temperature: float,
        strength: float,
    ):
        super().__init__(student)
        self.student: Classifier
        self.enhancement, self.teacher, self.old = enhancement, teacher, old
        self.temperature, self.strength = temperature, strength
        self.register_buffer("weights", weights)

    def forward(self, pixels: Tensor, labels: Tensor, loss: Loss) -> Tensor:
        """Return the loss of a batch."""
        features, logits = self.student.outputs(pixels)
        before, new = features.to(self.enhancement.weight.dtype).tensor_split(2, dim=1)
        distilled = distillation_loss(logits[:, : self.old], self.teacher(before)[:, : self.old], self.temperature)
        balanced = loss(features, logits / self.weights, labels)
        return balanced + loss(new, self.enhancement(new), labels) + self.strength * distilled


class CompressionLoss(Objective):
    """The distillation of a model by a larger one, whose probabilities are multiplied by weights of the classes."""

    weights: Tensor

    def __init__(self, student: Classifier, teacher: Frozen, weights: Tensor, temperature: float):
        super().__init__(student)
        self.teacher, self.temperature = teacher, temperature
        self.register_buffer("weights", weights)

    def forward(self, pixels: Tensor, labels: Tensor, loss: Loss) -> Tensor:
        """Return the loss of a batch; labels and the loss of the training settings are not used."""
        targets = (self.teacher(pixels).float() / self.temperature).softmax(dim=1) * self.weights
        targets = targets / targets.sum(dim=1, keepdim=True)
        return F.cross_entropy(self.student(pixels).float() / self.temperature, targets)
