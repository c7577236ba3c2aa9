"""The frame of methods whose head compares directions, as LUCIR and PODNet do."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cps.data.examples import read_labels
from cps.method import Assumptions
from cps.methods.blocks.balanced import balanced_examples, balanced_number
from cps.methods.blocks.heads import guard_rows
from cps.methods.blocks.memory import Memory
from cps.methods.blocks.teacher import Frozen, frozen
from cps.methods.cosine.cosine_head import CosineHead, class_vectors, grow_cosine_head, make_cosine_head
from cps.methods.single_head import SingleHead
from cps.methods.task_training import TaskTraining, phase_shares
from cps.network.backbones import remove_last_relu
from cps.network.classifier import Classifier, Loss
from cps.network.freezing import Guard
from cps.training.objective import Objective, Trained
from cps.training.settings import SGD, Cosine, Training

VECTORS = 1060  # purpose of a seed
Classify = Callable[[CosineHead, Tensor, Tensor, Loss], Tensor]  # head, features, labels -> the loss of a batch


@dataclass(eq=False)
class CosineMethod(SingleHead):
    """One network with signed features, and a head that compares their direction with `proxies` vectors of each class.

    The vectors of new classes start from the features of their images, and those of old classes stay as they are until
    the balanced phase: with `balanced`, the head alone is then trained on as many images of every class as there are of
    the old ones in memory. Similarities are multiplied by `scale`, which is learned if `learns_scale`. The last ReLU of
    builtin ResNets and of `SmallConvNet` is removed; other backbones should have none.
    """

    train: Training = Training(160, SGD(0.1, weight_decay=5e-4), Cosine())
    memory: Memory | None = Memory(per_class=20)
    balanced: Training | None = None
    proxies: int = 1
    scale: float = 1.0
    learns_scale: bool = True

    has_teacher = True
    positive = ("proxies", "scale")
    name = "cosine head"
    assumes = Assumptions(replay=True)

    @property
    def head(self) -> CosineHead:
        """The head of the model."""
        assert isinstance(self.model.head, CosineHead)
        return self.model.head

    def new_backbone(self) -> nn.Module:
        """Return a copy of the backbone without its last ReLU."""
        backbone = super().new_backbone()
        remove_last_relu(backbone)
        return backbone

    def head_settings(self) -> dict[str, Any]:
        """Return the settings of the head."""
        return {"proxies": self.proxies, "scale": self.scale, "learns_scale": self.learns_scale}

    def grow_model(self, outputs: int, draws: torch.Generator) -> None:
        """Add vectors of new classes, in random directions."""
        if len(self.classes) > 1:
            self.model.head = grow_cosine_head(self.head, outputs, draws)
        else:
            self.model.head = make_cosine_head(self.num_features, outputs, draws, **self.head_settings())

    def train_task(self, task: TaskTraining) -> None:
        """Train the model with the vectors of old classes frozen, then the head alone on a balanced set."""
        self._start_vectors(task)
        examples, balanced = self.with_exemplars(task.examples), self.balanced
        number = balanced_number(self, task) if balanced is not None else 0
        phases = [(self.train, len(examples))]
        if balanced is not None:
            phases.append((balanced, number * self.num_classes))
        shares = phase_shares(*phases)
        task.fit(self.objective(task), examples, self.train, guard=self.guard(task), share=shares[0])
        if balanced is not None and number:
            with frozen(self.model.backbone) as backbone:
                task.fit(
                    HeadObjective(self.head, backbone, self.classification),
                    balanced_examples(self, task, number),
                    balanced,
                    phase="balanced training",
                    share=shares[1],
                    guard={"scale": guard_rows(self.head, 1, prefix="")["scale"]},
                )

    def guard(self, task: TaskTraining) -> Guard:
        """Return the guard of the vectors of old classes."""
        return {"head.weight": guard_rows(self.head, task.old * self.proxies)["head.weight"]}

    @torch.no_grad()
    def _start_vectors(self, task: TaskTraining) -> None:
        """Start the vectors of new classes from the features of their images, with the mean length of the old ones.

        Those of the first task stay random.
        """
        if task.old:
            rows, weight = task.old * self.proxies, self.head.weight
            features, labels = self.features_of(task.examples), read_labels(task.examples)
            draws = task.generator(VECTORS)
            vectors = class_vectors(features, labels, task.labels.tolist(), self.proxies, draws)
            weight[rows:] = vectors.to(weight) * weight[:rows].norm(dim=1).mean()

    def classification(self, head: CosineHead, features: Tensor, labels: Tensor, loss: Loss) -> Tensor:
        """Return how well the head classifies features: by default the loss of the training settings."""
        return loss(features, head(features), labels)

    def objective(self, task: TaskTraining) -> Trained:
        """Return the classification loss."""
        return CosineObjective(self.model, self.classification)


class CosineObjective(Objective):
    """A loss of the features and the head of a network."""

    def __init__(self, student: Classifier, classify: Classify):
        super().__init__(student)
        self.student: Classifier
        self.classify = classify

    @property
    def head(self) -> CosineHead:
        """The head of the student."""
        assert isinstance(self.student.head, CosineHead)
        return self.student.head

    def forward(self, pixels: Tensor, labels: Tensor, loss: Loss) -> Tensor:
        """Return the loss of a batch."""
        return self.classify(self.head, self.student.backbone(pixels), labels, loss)


class HeadObjective(Objective):
    """A loss of a head on the features of a frozen backbone, which stays in evaluation mode."""

    def __init__(self, head: CosineHead, backbone: Frozen, classify: Classify):
        super().__init__(head)
        self.student: CosineHead
        self.backbone, self.classify = backbone, classify

    def forward(self, pixels: Tensor, labels: Tensor, loss: Loss) -> Tensor:
        """Return the loss of a batch."""
        return self.classify(self.student, self.backbone(pixels), labels, loss)
