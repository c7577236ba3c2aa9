"""A quadratic penalty that holds important parameters near their values after earlier tasks."""

import torch
from torch import Tensor

from cps.methods.regularization.importance import flat_parameters
from cps.network.classifier import Classifier, Loss
from cps.network.partition import trainable
from cps.training.objective import Objective


class Penalized(Objective):
    """A loss plus `strength` times the sum of importance_k (theta_k - anchor_k)^2 over the parameters of the backbone.

    The loss is that of the classes from `first` on. Without an `importance`, there is no penalty; without an `anchor`,
    it is where the parameters are now.
    """

    importance: Tensor
    anchor: Tensor

    def __init__(
        self,
        student: Classifier,
        first: int,
        strength: float,
        importance: Tensor | None = None,
        anchor: Tensor | None = None,
    ):
        super().__init__(student)
        self.student: Classifier
        self.first, self.strength = first, strength
        now = flat_parameters(student.backbone).detach()
        self.register_buffer("importance", torch.zeros_like(now) if importance is None else importance.clone())
        self.register_buffer("anchor", now.clone() if anchor is None else anchor.clone())

    def forward(self, pixels: Tensor, labels: Tensor, loss: Loss) -> Tensor:
        """Return the loss of a batch with the penalty."""
        features, logits = self.student.outputs(pixels)
        return loss(features, logits[:, self.first :], labels - self.first) + self.penalty()

    def penalty(self) -> Tensor:
        """Return the penalty of the present parameters."""
        moved = flat_parameters(self.student.backbone) - self.anchor
        return self.strength * (self.importance * moved.square()).sum()


class PathIntegral(Penalized):
    """A penalized loss that also sums, over all steps, by how much the moves of each parameter lower the loss.

    `path` is the sum of -g_k dtheta_k, where g is the gradient of the loss without the penalty, and dtheta is how far
    the whole step moves the parameter, with momentum and weight decay.
    """

    path: Tensor

    def __init__(self, student: Classifier, first: int, strength: float, importance: Tensor | None = None):
        super().__init__(student, first, strength, importance)
        self.register_buffer("path", torch.zeros_like(self.anchor))

    @torch.no_grad()
    def before_step(self) -> None:
        """Keep the parameters and their gradients."""
        parameters = trainable(self.student.backbone).values()
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
        self._before = flat_parameters(self.student.backbone)
        of_penalty = 2 * self.strength * self.importance * (self._before - self.anchor)
        self._gradient = torch.cat([gradient.flatten() for gradient in gradients]) - of_penalty

    @torch.no_grad()
    def after_step(self) -> None:
        """Add the step. In 16-bit precision a step is skipped if its gradients are not finite."""
        moved = flat_parameters(self.student.backbone) - self._before
        self.path -= (self._gradient * moved).nan_to_num(0.0, 0.0, 0.0)
