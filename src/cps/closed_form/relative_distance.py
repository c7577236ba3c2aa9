"""The relative Mahalanobis distance: how much closer an image is to the nearest class than to all images together.

It is d0 - min d_c. d_c is the squared distance to the mean of class c with the covariance S within classes, and d0 that
to the mean of all class means, with the covariance S + B of all images together, where B is the covariance of the class
means. Images of unknown classes have small values. What all images have in common, such as an unusual background, adds
to both distances and cancels.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cps.closed_form.calibration import leave_one_out_scores, whiten
from cps.closed_form.classifiers import LDA, LinearScores, mean_of_classes
from cps.closed_form.sums import Moments
from cps.runtime.devices import as_float64


class RelativeDistance(NamedTuple):
    """The relative distance as a function of features, for classes that have images.

    With z = (features - centre) @ weights, the scores z + offsets are (d - d_c) / 2, where d is the squared distance to
    the centre with the covariance S. By the formula of Woodbury, d0 = d - |z @ whitening|^2. So the relative distance
    is 2 max(z + offsets) - |z @ whitening|^2, and no matrix of the size of the features is needed.
    """

    scores: LinearScores
    whitening: Tensor

    @classmethod
    def of(cls, scores: LinearScores, counts: Tensor, means: Tensor) -> "RelativeDistance":
        """Return the relative distance from scores of LDA, or of nearest means, and what they were computed from."""
        has_images = counts > 0
        centre, weights, offsets = scores.centre, scores.weights[:, has_images], scores.offsets[has_images]
        products = (means[has_images] - centre) @ weights  # (classes, classes)
        inner = (products + products.T) / 2
        inner.diagonal().add_(len(inner))
        factor = torch.linalg.cholesky(inner)
        whitening = torch.linalg.solve_triangular(factor.T, torch.eye(len(inner)).to(factor), upper=True)
        return cls(LinearScores(centre, weights, offsets), whitening)

    def __call__(self, features: Tensor) -> Tensor:
        """Return the relative distance (N,) of features (N, d)."""
        return self.of_scores(self.scores(features))

    def of_scores(self, scores: Tensor) -> Tensor:
        """Return the relative distance (N,) from the scores (N, classes) of the classes that have images."""
        common = (scores - self.scores.offsets) @ self.whitening
        return 2 * scores.amax(dim=1) - common.pow(2).sum(dim=1)


def leave_one_out_distances(
    features: Tensor, labels: Tensor, moments: Moments, classifier: LDA, *, in_covariance: bool = True
) -> Tensor:
    """Return the relative distance (N,) of images that `moments` contains, each without itself.

    It is minus infinity for an image that is the only one of its class. The arguments are those of
    `leave_one_out_scores`, and so is what is meant by "without itself".
    """
    scores = leave_one_out_scores(features, labels, moments, classifier, in_covariance=in_covariance)
    has_images = moments.counts > 0
    centre = mean_of_classes(moments.counts, moments.means)
    factor = torch.linalg.cholesky(classifier.shrunk(moments.covariance))
    means = whiten(moments.means[has_images] - centre, factor)
    images = whiten(as_float64(features) - centre, factor)
    labels = labels.to(has_images.device)
    counts = moments.counts[labels]
    removed = (1 - classifier.shrinkage) / moments.images if in_covariance else 0.0
    to_all = _distances_to_all(images, has_images.cumsum(0)[labels] - 1, means, counts, removed)
    return (to_all + 2 * scores.amax(dim=1)).masked_fill(counts < 2, -torch.inf)


def _distances_to_all(images: Tensor, labels: Tensor, means: Tensor, counts: Tensor, removed: float) -> Tensor:
    """Return the squared distance (N,) of each image, without itself, to all images together.

    `images` (N, d) and `means` (classes, d) are whitened and have the centre at 0. `counts` (N,) is the number of
    images of each one's class, and `removed` the weight with which its product with itself is in the covariance.

    Without an image, the mean of its class moves along the image's deviation from it, the centre by a part of that, and
    the inverse covariance grows along it. So the system of the classes in the formula of Woodbury changes by a matrix
    of rank two, which the formula takes in again.
    """
    classes, count = len(means), counts[:, None].to(images)
    own = images - means[labels]  # (N, d)
    step = -1 / (count - 1).clamp(min=1)  # of the mean of the class, in deviations
    seen = images - step / classes * own  # from the centre without the image
    norm = own.pow(2).sum(dim=1, keepdim=True)
    share = removed * count / (count - 1).clamp(min=1)
    gain = share / (1 - share * norm).clamp(min=1e-9)  # of the inverse covariance along the deviation
    moved = F.one_hot(labels, classes).to(images) - 1 / classes  # how the means move, relative to the centre
    along, ahead = own @ means.T, (own * seen).sum(dim=1, keepdim=True)
    products = seen @ means.T + ahead * (step * moved + gain * (along + step * norm * moved))  # with the moved means
    mixed = step * (1 + gain * norm)  # the entries of the change of rank two
    change = torch.stack([torch.cat([step * norm * mixed, mixed], 1), torch.cat([mixed, gain], 1)], 1)  # (N, 2, 2)
    system = torch.linalg.inv(means @ means.T + classes * torch.eye(classes).to(means))
    directions = torch.stack([moved, along], dim=1)  # (N, 2, classes)
    solved = directions @ system
    inner = solved @ directions.transpose(1, 2)  # (N, 2, 2)
    seen_along = (solved @ products[:, :, None]).squeeze(2)  # (N, 2)
    correction = torch.linalg.solve(torch.eye(2).to(inner) + change @ inner, change @ seen_along[:, :, None]).squeeze(2)
    within = seen.pow(2).sum(dim=1) + (gain * ahead.pow(2))[:, 0]
    return within - ((products @ system) * products).sum(dim=1) + (seen_along * correction).sum(dim=1)
