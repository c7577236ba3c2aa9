"""R-EWC: EWC in coordinates of each layer in which the Fisher information is nearly diagonal."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from cps.methods.regularization.eigenbasis import Basis, layer_bases, rotated
from cps.methods.regularization.importance import exact_fisher, flat_parameters, image_batches
from cps.methods.regularization.separate_heads import LossFrom, SeparateHeads
from cps.methods.task_training import TaskTraining, with_prefix
from cps.network.classifier import Classifier, Loss
from cps.training.objective import Trained

IMAGES = 1020  # purpose of a seed


class Term(NamedTuple):
    """What holds the parameters near those after a task: their Fisher information, in rotated coordinates."""

    fisher: Tensor
    anchor: Tensor
    bases: dict[str, Basis]


@dataclass(eq=False)
class REWC(SeparateHeads):
    """Rotated elastic weight consolidation (Liu et al., ICPR 2018).

    The penalty is that of EWC for the weights W' = U2^T W U1 of each layer, where U1 are the eigenvectors of the second
    moments of its inputs after a task, and U2 those of the gradients at its outputs. The network itself is not changed:
    steps of gradient descent are the same in rotated coordinates. Other parameters have the penalty of EWC.
    """

    strength: float = 100.0
    images: int = 500

    positive = ("images",)
    name = "R-EWC"

    def objective(self, task: TaskTraining) -> Trained:
        """Return the loss with the penalty; for the first task, the loss alone."""
        if not self.buffers:
            return super().objective(task)
        terms = [self.term(index) for index in range(task.index)]
        return RotatedPenalty(self.model, self.first_class(task), self.strength / 2, terms)

    def term(self, task: int) -> Term:
        """Return the term of an earlier task."""
        kept = with_prefix(f"{task}/", self.buffers)
        inputs, outputs = with_prefix("inputs/", kept), with_prefix("outputs/", kept)
        return Term(kept["fisher"], kept["anchor"], {name: Basis(inputs[name], outputs[name]) for name in inputs})

    def end_task(self, task: TaskTraining) -> None:
        """Keep the coordinates after the task, and the Fisher information in them."""
        model, first = self.model.eval(), self.first_class(task)
        batches = partial(image_batches, model, task.examples, self.images, self.prepare)
        bases = self.bases(model, batches(task.generator(IMAGES)), first)
        rotate = partial(rotated, backbone=model.backbone, bases=bases)
        fisher = exact_fisher(model, batches(task.generator(IMAGES)), first, rotate)
        kept = {"fisher": fisher, "anchor": flat_parameters(model.backbone).detach()}
        kept |= {f"inputs/{name}": basis.inputs for name, basis in bases.items()}
        kept |= {f"outputs/{name}": basis.outputs for name, basis in bases.items()}
        self.buffers |= {f"{task.index}/{name}": value for name, value in kept.items()}

    def bases(self, model: Classifier, batches: Iterable[Tensor], first: int) -> dict[str, Basis]:
        """Return the coordinates of the layers."""
        return layer_bases(model, batches, first)


class RotatedPenalty(LossFrom):
    """The loss over the classes from `first` on plus `strength` times the penalties of terms."""

    def __init__(self, student: Classifier, first: int, strength: float, terms: Sequence[Term]):
        super().__init__(student, first)
        self.strength, self.terms = strength, list(terms)

    def forward(self, pixels: Tensor, labels: Tensor, loss: Loss) -> Tensor:
        """Return the loss of a batch with the penalty."""
        return super().forward(pixels, labels, loss) + self.penalty()

    def penalty(self) -> Tensor:
        """Return the penalty of the present parameters, whose rotation is in full precision."""
        backbone = self.student.backbone
        with torch.autocast(flat_parameters(backbone).device.type, enabled=False):
            parts = [
                (term.fisher * rotated(flat_parameters(backbone) - term.anchor, backbone, term.bases).square()).sum()
                for term in self.terms
            ]
            return self.strength * torch.stack(parts).sum()
