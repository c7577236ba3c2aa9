"""EEIL: distil every earlier task by itself, then fine-tune on a balanced set."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cps.method import Assumptions
from cps.methods.blocks.balanced import balanced_examples, balanced_number
from cps.methods.blocks.distillation import distillation_loss
from cps.methods.blocks.gradient_noise import GradientNoise
from cps.methods.blocks.memory import Memory
from cps.methods.blocks.teacher import Teacher
from cps.methods.single_head import SingleHead
from cps.methods.task_training import TaskTraining, phase_shares
from cps.network.classifier import Classifier, Loss
from cps.runtime.seeding import derive_seed
from cps.training.objective import Objective
from cps.training.settings import SGD, Steps, Training

NOISE = 1030  # purpose of a seed


@dataclass(eq=False)
class EEIL(SingleHead):
    """End-to-end incremental learning (Castro et al., ECCV 2018).

    The loss is the cross-entropy over all classes, plus a distillation loss for each earlier task, whose softmax is
    over its classes alone. Then the network is trained in the same way on a balanced set of old and new images, where
    the model before this phase distils the new classes, too. Gradients get noise, which counts as that of a sum over a
    batch: the released code adds it before it divides by the size of the batch.
    """

    train: Training = Training(40, SGD(0.1, weight_decay=1e-4), Steps((10, 20, 30), 0.1))
    balance: Training = Training(30, SGD(0.01, weight_decay=1e-4), Steps((10, 20), 0.1))
    memory: Memory | None = Memory(2000)
    temperature: float = 2.0
    noise: GradientNoise | None = GradientNoise()

    has_teacher = True
    positive = ("temperature",)
    name = "EEIL"
    assumes = Assumptions(replay=True)

    def train_task(self, task: TaskTraining) -> None:
        """Train on all images, then on a balanced set."""
        examples, number = self.with_exemplars(task.examples), balanced_number(self, task)
        shares = phase_shares((self.train, len(examples)), (self.balance, number * self.num_classes))
        teacher = Teacher(self.model) if task.old else None
        task.fit(self._objective(task, teacher, None), examples, self.train, share=shares[0])
        if number:
            objective = self._objective(task, teacher, Teacher(self.model))
            balanced = balanced_examples(self, task, number)
            task.fit(objective, balanced, self.balance, phase="balanced training", share=shares[1])

    def _objective(self, task: TaskTraining, earlier: Teacher | None, before: Teacher | None) -> "DistilledTasks":
        """Return the loss of a phase, with its noise."""
        sizes = [len(classes) for classes in self.classes[: task.index]]
        seed = (self.seed, task.index, NOISE, int(before is not None))
        return DistilledTasks(
            self.model, sizes, self.temperature, earlier, before, self.noise, self.train.batch_size, seed
        )


class DistilledTasks(Objective):
    """The loss over all classes, plus the distillation of each earlier task, and of the new classes.

    `sizes` are the numbers of classes of earlier tasks, which `earlier` distils; `before` distils the new classes.
    """

    def __init__(
        self,
        student: Classifier,
        sizes: Sequence[int],
        temperature: float,
        earlier: Teacher | None,
        before: Teacher | None = None,
        noise: GradientNoise | None = None,
        batch_size: int = 1,
        seed: Sequence[int] = (0,),
    ):
        super().__init__(student)
        self.student: Classifier
        self.earlier, self.before = earlier, before
        self.sizes, self.temperature = list(sizes), temperature
        self.noise, self.batch_size, self.seed = noise, batch_size, tuple(seed)

    def forward(self, pixels: Tensor, labels: Tensor, loss: Loss) -> Tensor:
        """Return the loss of a batch."""
        features, logits = self.student.outputs(pixels)
        total, old = loss(features, logits, labels), sum(self.sizes)
        if self.earlier is not None:
            targets = self.earlier(pixels)[:, :old].split(self.sizes, dim=1)
            for part, target in zip(logits[:, :old].split(self.sizes, dim=1), targets, strict=True):
                total = total + distillation_loss(part, target, self.temperature)
        if self.before is not None:
            total = total + distillation_loss(logits[:, old:], self.before(pixels)[:, old:], self.temperature)
        return total

    def before_epoch(self, epoch: int) -> None:
        """Draw the noise of an epoch from a seed, the same after an interruption and in all processes."""
        self.epoch, device = epoch, self.student.head.weight.device
        self.draws = torch.Generator(device).manual_seed(derive_seed(*self.seed, epoch))

    def before_step(self) -> None:
        """Add noise to the gradients."""
        if self.noise is not None:
            self.noise.add_to(self.student.parameters(), self.epoch, self.draws, batch_size=self.batch_size)
