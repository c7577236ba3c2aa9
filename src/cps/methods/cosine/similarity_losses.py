"""Losses of the similarities between features and the vectors of classes."""

import torch
import torch.nn.functional as F
from torch import Tensor


def nca_loss(similarities: Tensor, labels: Tensor, scale: Tensor | float = 1.0, margin: float = 0.6) -> Tensor:
    """Return the mean of `max(0, -scale (y_label - margin) + log sum_{i != label} exp(scale y_i))` over N images.

    `similarities` are y (N, classes). It is the loss of neighbourhood component analysis with a margin and a hinge
    (Movshovitz-Attias et al., ICCV 2017; PODNet, eq. 5).
    """
    logits, own = scale * similarities, labels[:, None]
    others = logits.scatter(1, own, torch.finfo(logits.dtype).min).logsumexp(dim=1)
    return F.relu(others + scale * margin - logits.gather(1, own)[:, 0]).mean()


def released_nca_loss(similarities: Tensor, labels: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """Return the loss that the published code of PODNet computes instead.

    Its margin is subtracted from all similarities, so it has no effect. The largest one is then subtracted, too, and
    the label counts as exp(0) in the sum, which should leave it out. There is no hinge.
    """
    logits, own = scale * similarities, labels[:, None]
    logits = logits - logits.amax(dim=1, keepdim=True)
    return (logits.scatter(1, own, 0.0).logsumexp(dim=1) - logits.gather(1, own)[:, 0]).mean()


def margin_ranking_loss(
    similarities: Tensor, labels: Tensor, old: int, *, margin: float = 0.5, rivals: int = 2
) -> Tensor:
    """Return how much images of old classes lack of a margin between their class and the most similar new ones.

    The mean of `max(0, margin - y_label + y_k)` over the images with a label below `old`, and over the `rivals` new
    classes k with the largest similarities (LUCIR, eq. 8). Without such images it is 0.
    """
    is_old = labels < old
    number = min(rivals, similarities.shape[1] - old)
    largest = similarities[:, old:].topk(number, dim=1).values  # (N, number)
    lacking = F.relu(margin - similarities.gather(1, labels[:, None]) + largest)
    return (lacking * is_old[:, None]).sum() / (number * is_old.sum()).clamp(min=1)
