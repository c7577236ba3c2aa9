"""Objectives: what training minimises if it is more than a loss of the outputs."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from cps.network.classifier import Classifier, Loss
from cps.network.partition import trainable
from cps.training.settings import Training


class Objective(nn.Module):
    """A module whose forward returns the loss of a batch.

    `student` is the module that is trained; a guard names its parameters. Other modules, such as a frozen teacher, may
    stand beside it: parameters that require no gradient are not trained. Objectives are trained by plain steps.
    """

    def __init__(self, student: nn.Module):
        super().__init__()
        self.student = student

    def forward(self, pixels: Tensor, labels: Tensor, loss: Loss) -> Tensor:
        """Return the loss of a batch; `loss` is that of the training settings."""
        raise NotImplementedError

    def before_epoch(self, epoch: int) -> None:
        """Called before each epoch, counted from 0."""

    def make_optimizer(self, training: Training) -> torch.optim.Optimizer:
        """Return the optimizer of everything that is trained: by default, that of the training settings."""
        return training.optimizer(trainable(self).values())

    def before_step(self) -> None:
        """Called when a batch has its gradients, those of the loss itself, before the optimizer uses them."""

    def after_step(self) -> None:
        """Called after the optimizer has moved the parameters and the guard has restored those that must stay."""


Trained = Classifier | Objective


def guarded_parameters(model: Trained) -> Mapping[str, nn.Parameter]:
    """Return the parameters that a guard can protect, by the names that it uses."""
    return dict((model.student if isinstance(model, Objective) else model.backbone).named_parameters())
