"""DER: a new feature extractor for every task, beside the frozen ones of earlier tasks."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cps.method import Assumptions
from cps.methods.blocks.balanced import balanced_examples, balanced_number
from cps.methods.blocks.memory import Memory
from cps.methods.blocks.teacher import frozen
from cps.methods.expansion.columns import Columns
from cps.methods.expansion.head_loss import HeadLoss
from cps.methods.single_head import SingleHead
from cps.methods.task_training import TaskTraining, phase_shares
from cps.network.classifier import Classifier, Loss, make_head
from cps.training.objective import Objective, Trained
from cps.training.settings import SGD, Steps, Training

AUXILIARY, BALANCED_HEAD = 1050, 1051  # purposes of a seed


@dataclass(eq=False)
class DER(SingleHead):
    """Dynamically expandable representation (Yan et al., CVPR 2021), without its pruning, which was not released.

    Every task adds a copy of the last feature extractor, and the earlier ones are frozen. The loss is the cross-entropy
    of one head on the joined features, plus that of an auxiliary head on the new features, whose classes are the new
    ones and one for all old ones together. The head keeps its weights for old features and classes. Then a new head is
    trained on a balanced set of old and new images with its logits divided by `temperature`; its weights are divided
    by it at the end.
    """

    train: Training = Training(170, SGD(0.1, weight_decay=5e-4), Steps((100, 120), 0.1))
    balance: Training = Training(30, SGD(0.1, weight_decay=5e-4), Steps((15,), 0.1))
    memory: Memory | None = Memory(2000)
    temperature: float = 5.0

    positive = ("temperature",)
    name = "DER"
    assumes = Assumptions(replay=True, grows=True)

    def new_backbone(self) -> nn.Module:
        """Return one column, a copy of the given backbone."""
        return Columns(super().new_backbone())

    def grow_model(self, outputs: int, draws: torch.Generator) -> None:
        """Add a column, from the second task on, and outputs."""
        if len(self.classes) > 1:
            assert isinstance(self.model.backbone, Columns)
            self.model.backbone.add()
        super().grow_model(outputs, draws)

    def train_task(self, task: TaskTraining) -> None:
        """Train the new column and the head, then a new head on a balanced set."""
        examples, number = self.with_exemplars(task.examples), balanced_number(self, task)
        shares = phase_shares((self.train, len(examples)), (self.balance, number * self.num_classes))
        task.fit(self.objective(task), examples, self.train, share=shares[0])
        if number:
            self._train_head(task, number, shares[1])

    def objective(self, task: TaskTraining) -> Trained:
        """Return the loss with that of the auxiliary head; for the first task, the loss alone."""
        if task.old == 0:
            return self.model
        features = self.num_features // len(self.classes)
        auxiliary = make_head(features, task.new + 1, task.generator(AUXILIARY)).to(self.device)
        return ExpandedLoss(self.model, auxiliary, task.old)

    def _train_head(self, task: TaskTraining, number: int, share: float) -> None:
        """Train a new head on a balanced set."""
        balanced = balanced_examples(self, task, number)
        head = make_head(self.num_features, self.num_classes, task.generator(BALANCED_HEAD))
        self.model.head.load_state_dict(head.state_dict())
        with frozen(self.model.backbone) as backbone:
            objective = HeadLoss(self.model.head, backbone, self.temperature)
            task.fit(objective, balanced, self.balance, phase="balanced head", share=share)
        with torch.no_grad():
            for value in self.model.head.parameters():
                value /= self.temperature


class ExpandedLoss(Objective):
    """The loss over all classes, plus that of an auxiliary head on the features of the last column.

    The auxiliary classes are 0 for all old ones, and 1, 2, ... for the new ones.
    """

    def __init__(self, student: Classifier, auxiliary: nn.Linear, old: int):
        super().__init__(student)
        self.student: Classifier
        self.auxiliary, self.old = auxiliary, old

    def forward(self, pixels: Tensor, labels: Tensor, loss: Loss) -> Tensor:
        """Return the loss of a batch."""
        features, logits = self.student.outputs(pixels)
        new = features[:, -self.auxiliary.in_features :].to(self.auxiliary.weight.dtype)
        return loss(features, logits, labels) + loss(new, self.auxiliary(new), auxiliary_labels(labels, self.old))


def auxiliary_labels(labels: Tensor, old: int) -> Tensor:
    """Return 0 for old classes, and 1, 2, ... for the new ones."""
    return (labels - old + 1).clamp(min=0)
