"""The relative Mahalanobis distance: how much closer an image is to the nearest class than to all images together.

It is d0 - min d_c. d_c is the squared distance to the mean of class c with the covariance S within classes, and d0 that
to the mean of all class means, with the covariance S + B of all images together, where B is the covariance of the class
means. Images of unknown classes have small values. What all images have in common, such as an unusual background, adds
to both distances and cancels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from cps.closed_form.calibration import leave_one_out_scores
from cps.closed_form.classifiers import LDA, LinearScores
from cps.closed_form.sums import Moments


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

    It is not finite for an image that is the only one of its class. The arguments are those of `leave_one_out_scores`.
    An image stays in the centre and in the covariance B of the class means. So with fewer images than features the
    distances are lower than those of a new fit without the image, and a threshold from them rejects fewer images.
    """
    distance = RelativeDistance.of(classifier.fit(moments), moments.counts, moments.means)
    # The centre as one more class, since all scores are compared with its own.
    counts = torch.cat([moments.counts, moments.counts.new_ones(1)])
    means = torch.cat([moments.means, distance.scores.centre[None]])
    with_centre = Moments(counts, means, moments.covariance, moments.images)
    scores = leave_one_out_scores(features, labels, with_centre, classifier, in_covariance=in_covariance)
    relative = scores[:, :-1] - scores[:, -1:]
    return distance.of_scores(relative[:, moments.counts > 0])
