"""Distillation: terms of a loss that keep a model close to its teacher."""

import torch.nn.functional as F
from torch import Tensor


def distillation_loss(logits: Tensor, teacher: Tensor, temperature: float = 2.0) -> Tensor:
    """Return the mean cross-entropy of the softened outputs with those of the teacher, both of shape (N, classes).

    Hinton's factor of the squared temperature is left out, as in the published code of the methods that use it.
    """
    targets = (teacher.float() / temperature).softmax(dim=1)
    return F.cross_entropy(logits.float() / temperature, targets)
