"""The head of a subnetwork behind a trunk: a closed form of its features, joined with those of the backbone as it came.

Few images overfit a trained head, and the features of the backbone as it came know more than nothing about every task.
Whether training has paid is decided by held-out images: if not, the task keeps the closed form of the latter alone.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from cps.closed_form.calibration import best_temperature, calibrated_lda, log_loss_by_temperature
from cps.closed_form.classifiers import LinearScores
from cps.data.examples import Examples, ImageBatches, read_labels
from cps.network.draft import Draft
from cps.network.shared import SharedNetwork

ENOUGH_HELD_OUT = 20  # images to decide with


class ClosedFormHead(NamedTuple):
    """Scores of the joined features, or, if training has not paid, of the features of the backbone as it came."""

    scores: LinearScores
    has_paid: bool


def fit_head(network: SharedNetwork, draft: Draft, examples: Examples, held_out: Examples | None) -> ClosedFormHead:
    """Return the head for a trained and pruned draft; held-out images calibrate it and decide whether it has paid."""
    labels, classes = read_labels(examples), len(draft.classes)
    features = network.joined_features(draft, ImageBatches(examples))
    joined = calibrated_lda(features, labels, classes)
    if held_out is None or len(held_out) < ENOUGH_HELD_OUT:
        return ClosedFormHead(joined, True)
    came = features.shape[1] // 2
    alone = calibrated_lda(features[:, came:], labels, classes)
    others, truth = network.joined_features(draft, ImageBatches(held_out)), read_labels(held_out)
    losses = _losses(joined, others, truth), _losses(alone, others[:, came:], truth)
    if losses[0].min() >= losses[1].min():
        return ClosedFormHead(alone, False)
    temperature = best_temperature(losses[0])
    return ClosedFormHead(LinearScores(joined.centre, joined.weights / temperature, joined.offsets / temperature), True)


def _losses(scores: LinearScores, features: Tensor, labels: Tensor) -> Tensor:
    """Return the log losses of features by temperature."""
    found = scores(features)
    return log_loss_by_temperature(found, labels.to(found.device)).to(torch.float64)
