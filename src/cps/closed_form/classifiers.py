"""Closed-form classifiers: linear functions of the features, computed from sums.

All give each class a score that is linear in the features. Scores of `NearestMean` and `LDA` are log likelihoods of
normal distributions up to a constant, those of `Ridge` are predictions of one-hot targets. `NearestMean` and `LDA` give
all classes equal priors.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from cps.closed_form.sums import Moments
from cps.storage.settings_codec import NumericSettings, setting

TINY = 1e-12  # smallest mean variance, for features that are all constant


class LinearScores(NamedTuple):
    """Scores of classes as a function of features: `(features - centre) @ weights + offsets`.

    `weights` (d, classes) and `offsets` (classes,) have one column or entry for each class of all tasks, in order.
    Subtracting the `centre` (d,) first keeps small differences of large features in float32.
    """

    centre: Tensor
    weights: Tensor
    offsets: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        """Return scores (N, classes) of features (N, d)."""
        return (features - self.centre) @ self.weights + self.offsets


class Classifier(Protocol):
    """Computes the scores of the classes of all tasks from their moments."""

    def fit(self, moments: Moments) -> LinearScores:
        """Return the scores of all classes, in float64."""
        ...


@setting
@dataclass(frozen=True)
class NearestMean(NumericSettings):
    """The class whose mean is closest. Squared distances are divided by the mean variance within classes.

    A class without images scores minus infinity.
    """

    def fit(self, moments: Moments) -> LinearScores:
        """Return the scores of all classes, in float64."""
        return nearest_mean_scores(moments.counts, moments.means, mean_variance(moments.covariance))


@setting
@dataclass(frozen=True)
class LDA(NumericSettings):
    """Linear discriminant analysis: normal distributions with one covariance, which is shrunk.

    The covariance is (1 - shrinkage) * S + shrinkage * mean(diag(S)) * I. S is the mean over all images, so classes
    with more images weigh more in it. scikit-learn weighs the covariances of classes by their priors, here all equal;
    with as many images of each class, both are the same. A class without images scores minus infinity.
    """

    shrinkage: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        # With less, a covariance that a file holds in float32 may have no Cholesky factor.
        self._require("shrinkage", 1e-4 <= self.shrinkage <= 1, must="in [0.0001, 1]")

    def fit(self, moments: Moments) -> LinearScores:
        """Return the scores of all classes, in float64."""
        centre = mean_of_classes(moments.counts, moments.means)
        means = moments.means - centre
        weights = torch.cholesky_solve(means.T, torch.linalg.cholesky(self.shrunk(moments.covariance)))
        return _normal_scores(moments.counts, centre, means, weights)

    def shrunk(self, covariance: Tensor) -> Tensor:
        """Return the shrunk covariance."""
        shrunk = (1 - self.shrinkage) * covariance
        shrunk.diagonal().add_(self.shrinkage * mean_variance(covariance))
        return shrunk


@setting
@dataclass(frozen=True)
class Ridge(NumericSettings):
    """Ridge regression of one-hot targets with an intercept. All images have equal weight.

    `penalty` is relative to the mean of the Gram matrix's diagonal, so it does not depend on the scale of the features
    or on the number of images.
    """

    penalty: float = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("penalty", self.penalty >= 1e-9, must="1e-9 or more")

    def fit(self, moments: Moments) -> LinearScores:
        """Return the scores of all classes, in float64."""
        shares = moments.counts / moments.counts.sum().clamp(min=1)
        centre = shares @ moments.means
        weighted = shares[:, None] * (moments.means - centre)  # (classes, d)
        between = (moments.means - centre).T @ weighted
        gram = moments.covariance + between  # of centred features, divided by the number of images
        gram.diagonal().add_(self.penalty * mean_variance(gram))
        return LinearScores(centre, torch.linalg.solve(gram, weighted.T), shares)


def mean_variance(covariance: Tensor) -> float:
    """Return the mean variance of the features; above 0 even if all are constant."""
    return max(float(covariance.diagonal().mean()), TINY)


def nearest_mean_scores(counts: Tensor, means: Tensor, variance: float) -> LinearScores:
    """Return log likelihoods of normal distributions with the covariance variance * I, up to a constant."""
    centre = mean_of_classes(counts, means)
    means = means - centre
    return _normal_scores(counts, centre, means, means.T / variance)


def mean_of_classes(counts: Tensor, means: Tensor) -> Tensor:
    """Return the mean (d,) of the means (classes, d) of all classes that have images."""
    has_images = (counts > 0).to(means.dtype)
    return has_images @ means / has_images.sum().clamp(min=1)


def _normal_scores(counts: Tensor, centre: Tensor, means: Tensor, weights: Tensor) -> LinearScores:
    """Return log likelihoods up to a constant; `means` are centred, and `weights` (d, classes) are C^-1 means."""
    offsets = -(means.T * weights).sum(dim=0) / 2
    return LinearScores(centre, weights, offsets.masked_fill(counts == 0, -torch.inf))
