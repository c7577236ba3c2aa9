"""Weights of classes with unequal numbers of images."""

from collections.abc import Sequence

import torch
from torch import Tensor


def effective_number_weights(counts: Sequence[int], beta: float) -> Tensor:
    """Return a weight for each class, with a mean of 1, by its effective number of images (Cui et al., CVPR 2019).

    The weight is proportional to (1 - beta) / (1 - beta^count): equal for equal counts, and larger for rare classes.
    """
    weights = (1 - beta) / (1 - beta ** torch.tensor(counts, dtype=torch.float64))
    return (weights / weights.mean()).float()
