"""Leave-one-out scores of LDA in closed form, and the temperature that calibrates its probabilities.

Discriminants are overconfident on the images they were computed from. Leaving an image out changes the mean of
its class and takes one rank off the covariance, so its scores without itself need no second fit.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from cps.closed_form.classifiers import LDA, LinearScores, mean_of_classes
from cps.closed_form.sums import ROWS, Moments, Sums
from cps.runtime.devices import as_float64

SHRINKAGES = (0.001, 0.01, 0.1, 0.5)  # of the covariance, to choose from
CALIBRATION_IMAGES = 1000  # that get a leave-one-out score
TEMPERATURES = tuple(2.0 ** (step / 2) for step in range(-2, 17))  # 0.5 to 256


def calibrated_lda(features: Tensor, labels: Tensor, classes: int) -> LinearScores:
    """Return the LDA scores of `classes` classes, fitted to features (N, d), whose softmax is calibrated.

    Leave-one-out scores of at most `CALIBRATION_IMAGES` of the images choose the shrinkage and the temperature.
    """
    moments = Moments.of([Sums.of([(features, labels)], classes)])
    some = spread_indices(len(labels)).to(labels.device)
    candidates = [LDA(shrinkage) for shrinkage in SHRINKAGES]
    losses = torch.stack(
        [
            log_loss_by_temperature(leave_one_out_scores(features[some], labels[some], moments, each), labels[some])
            for each in candidates
        ]
    )
    best = int(losses.amin(dim=1).argmin())
    scores, temperature = candidates[best].fit(moments), best_temperature(losses[best])
    return LinearScores(scores.centre, scores.weights / temperature, scores.offsets / temperature)


def spread_indices(images: int) -> Tensor:
    """Return the indices of `CALIBRATION_IMAGES` images, or of all if there are fewer, spread evenly."""
    return torch.linspace(0, images - 1, min(images, CALIBRATION_IMAGES)).long()


def leave_one_out_scores(
    features: Tensor, labels: Tensor, moments: Moments, classifier: LDA, *, in_covariance: bool = True
) -> Tensor:
    """Return the LDA scores (N, classes) of images that `moments` contains, each without itself, in float64.

    `labels` are indices into all classes. A score is minus half the squared distance to the mean of a class. An image
    that is the only one of its class scores minus infinity there, as does every image for a class without images.

    `in_covariance` tells whether the images are in the covariance, too. If they are not, the scores are exactly those
    of a new fit without the image. If they are, the covariance is still divided by the number of all n images, and the
    identity that it is shrunk to keeps its factor. A new fit's distances are between (n - 1) / n and
    (n - 1) / (n * (1 - share)) times these, where `share` is what the image contributes to the sum of all variances:
    both factors are 1 up to about 1 / n.
    """
    factor = torch.linalg.cholesky(classifier.shrunk(moments.covariance))
    centre = mean_of_classes(moments.counts, moments.means)
    centres = whiten(moments.means - centre, factor)
    counts = moments.counts
    removed = (1 - classifier.shrinkage) / moments.images if in_covariance else 0.0
    parts = []
    for rows, own in zip(features.split(ROWS), labels.to(centres.device).split(ROWS), strict=True):
        distances = _distances_without_self(whiten(as_float64(rows) - centre, factor), own, centres, counts, removed)
        parts.append(-distances.masked_fill(counts == 0, torch.inf) / 2)
    return torch.cat(parts)


def whiten(rows: Tensor, factor: Tensor) -> Tensor:
    """Return rows (N, d) in coordinates in which the covariance, given by its Cholesky factor, is the identity."""
    return torch.linalg.solve_triangular(factor, rows.T, upper=False).T


def _distances_without_self(
    whitened: Tensor, labels: Tensor, centres: Tensor, counts: Tensor, removed: float
) -> Tensor:
    """Return the squared distances (N, classes) of whitened images to the class means, each without itself.

    `removed` is the weight with which an image's product with itself is in the covariance.
    """
    own = whitened - centres[labels]  # (N, d)
    count = counts[labels][:, None]
    growth = count / (count - 1).clamp(min=1)  # of the distance to the own mean, without the image in it
    norm = own.pow(2).sum(dim=1, keepdim=True)
    # The inverse covariance without the image, by the formula of Sherman and Morrison.
    gain = removed * growth / (1 - removed * growth * norm).clamp(min=1e-9)
    along = (own * whitened).sum(dim=1, keepdim=True) - own @ centres.T
    distances = torch.cdist(whitened, centres).pow(2) + gain * along.pow(2)
    own_distances = growth.pow(2) * (norm + gain * norm.pow(2))
    return distances.scatter(1, labels[:, None], own_distances.masked_fill(count < 2, torch.inf))


def log_loss_by_temperature(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the log losses of scores (N, classes) at each of `TEMPERATURES`.

    Images whose own class scores minus infinity do not count.
    """
    has_score = scores.gather(1, labels[:, None])[:, 0].isfinite()
    scores, labels = scores[has_score], labels[has_score]
    losses = [F.cross_entropy(scores / temperature, labels, reduction="sum") for temperature in TEMPERATURES]
    return torch.stack(losses)


def best_temperature(losses: Tensor) -> float:
    """Return the temperature with the smallest of the losses, interpolated between neighbours.

    Return 1 if the losses are all the same, as they are with a single class.
    """
    if losses.max() == losses.min():
        return 1.0
    best = int(losses.argmin())
    if best in (0, len(TEMPERATURES) - 1):
        return TEMPERATURES[best]
    before, at, after = losses[best - 1 : best + 2].tolist()
    curvature = before - 2 * at + after
    shift = 0.5 * (before - after) / curvature if curvature > 0 else 0.0  # vertex of the parabola, in steps
    return TEMPERATURES[best] * 2.0 ** (shift / 2)
