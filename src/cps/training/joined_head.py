"""The head of a subnetwork behind a trunk: its trained head, plus a closed form over the backbone as it came.

Few images overfit a trained network, and the features of the backbone as it came know something about every task.
Images that were held out of the training choose how much either counts. If they do not show that the trained head
helps, training has not paid, and the task keeps the closed form alone.
"""

from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cps.closed_form.calibration import calibrated_lda
from cps.closed_form.classifiers import LinearScores
from cps.closed_form.spaces import Pretrained
from cps.data.examples import Examples, ImageBatches, read_labels
from cps.network.classifier import RootHead
from cps.network.draft import Draft
from cps.network.shared import SharedNetwork
from cps.runtime.devices import as_float64

ENOUGH_HELD_OUT = 20  # images to choose with
WEIGHTS = (0.0, 0.25, 0.375, 0.5, 0.75, 1.0, 1.5, 2.0)  # of the trained head and of the closed form, to choose from
DEFAULT_WEIGHTS = 1.0, 0.5  # the same without enough held-out images


class JoinedHead(NamedTuple):
    """Scores of the joined features, or, if training has not paid, of the features of the backbone as it came."""

    scores: LinearScores
    has_paid: bool


@torch.no_grad()
def fit_head(network: SharedNetwork, draft: Draft, examples: Examples, held_out: Examples | None) -> JoinedHead:
    """Return the head for a trained and pruned draft, with the weights that held-out images choose."""
    features = network.features(ImageBatches(examples), Pretrained())
    closed = calibrated_lda(features, read_labels(examples).to(features.device), len(draft.classes))
    trained = _trained_scores(draft.model.head)
    weights = DEFAULT_WEIGHTS
    if held_out is not None and len(held_out) >= ENOUGH_HELD_OUT:
        others = network.joined_features(draft, ImageBatches(held_out))
        own, came = as_float64(others).tensor_split(2, dim=1)
        scores = trained(own), closed(came)
        weights = choose_weights(*scores, read_labels(held_out).to(scores[0].device))
        if weights[0] == 0:
            return JoinedHead(closed, has_paid=False)
    return JoinedHead(join_scores(trained, closed, *weights), has_paid=True)


def _trained_scores(head: nn.Module) -> LinearScores:
    """Return the scores of a trained head on features of unit length, in float64."""
    assert isinstance(head, RootHead)
    weight, bias = as_float64(head.weight), as_float64(head.bias)
    return LinearScores(weight.new_zeros(weight.shape[1]), RootHead.SCALE * weight.T, bias)


def choose_weights(trained: Tensor, closed: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return the weights of both scores with the smallest log loss.

    That of the trained ones is 0 unless the mean loss gets smaller by more than its standard error.
    """
    pairs = list(product(WEIGHTS, WEIGHTS))
    losses = torch.stack([F.cross_entropy(a * trained + b * closed, labels, reduction="none") for a, b in pairs])
    means = losses.mean(dim=1)
    best, alone = int(means.argmin()), int(means[: len(WEIGHTS)].argmin())
    gain = losses[alone] - losses[best]
    return pairs[best] if gain.mean() > gain.std() / len(gain) ** 0.5 else (0.0, 1.0)


def join_scores(trained: LinearScores, closed: LinearScores, own: float, came: float) -> LinearScores:
    """Return the weighted sum of both scores as a function of the joined features."""
    finite = closed.offsets.clamp(min=-1e4)  # a class without images has minus infinity
    return LinearScores(
        torch.cat([trained.centre, closed.centre]),
        torch.cat([own * trained.weights, came * closed.weights]),
        own * trained.offsets + came * finite,
    )
