"""Sums over the features of a task's images, from which closed-form classifiers are computed.

Adding sums is all that learning does, so the order of tasks and images does not matter, several processes can each sum
their part, and a task is unlearned by leaving its sums out. Everything is computed in float64.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cps.runtime.devices import as_float64

ROWS = 4096  # images whose features are converted to float64 at once


@dataclass(frozen=True, eq=False)
class Sums:
    """Sums over features of the images of some classes.

    `counts` (classes,) is the number of images of each class, `means` (classes, d) their mean features (0 for a class
    without images), and `scatter` (d, d) the sum of (f - mean)(f - mean)^T over all images, each with the mean of its
    own class.
    """

    counts: Tensor
    means: Tensor
    scatter: Tensor

    @classmethod
    def of(cls, batches: Iterable[tuple[Tensor, Tensor]], classes: int) -> "Sums":
        """Sum over batches of features (N, d) and labels (N,) from 0 to `classes` - 1.

        Raise `ValueError` for wrong shapes or labels or if there are no images, and `FloatingPointError` for features
        that are NaN or infinite.
        """
        total: Sums | None = None
        for features, labels in batches:
            _check_batch(features, labels, classes)
            for part, of_part in zip(features.split(ROWS), labels.split(ROWS), strict=True):
                sums = cls._of_rows(as_float64(part), of_part, classes)
                total = sums if total is None else total + sums
        if total is None or not total.counts.any():
            raise ValueError("there are no images to sum over")
        if not (total.means.isfinite().all() and total.scatter.isfinite().all()):
            raise FloatingPointError("some features, or their squares, are NaN or infinite; check images and space")
        return total

    @classmethod
    def _of_rows(cls, values: Tensor, labels: Tensor, classes: int) -> "Sums":
        labels = labels.to(values.device, torch.long)
        one_hot = F.one_hot(labels, classes).to(values.dtype)  # (N, classes)
        counts = one_hot.sum(dim=0)
        means = one_hot.T @ values / counts.clamp(min=1)[:, None]
        deviations = values - means[labels]
        return cls(counts, means, deviations.T @ deviations)

    def __add__(self, other: "Sums") -> "Sums":
        """Return the sums over the images of both, which are of the same classes."""
        if self.means.shape != other.means.shape:
            raise ValueError(
                "only sums over the same classes and features can be added, got (classes, features) = "
                f"{tuple(self.means.shape)} and {tuple(other.means.shape)}"
            )
        # Adding up squares and subtracting those of the means would lose the digits of features with large means.
        counts = self.counts + other.counts
        share = (other.counts / counts.clamp(min=1))[:, None]
        steps = other.means - self.means  # (classes, d)
        scatter = self.scatter + other.scatter + steps.T @ (self.counts[:, None] * share * steps)
        return Sums(counts, self.means + share * steps, scatter)

    @property
    def dims(self) -> int:
        """The number of features."""
        return self.means.shape[1]


def _check_batch(features: Tensor, labels: Tensor, classes: int) -> None:
    """Raise `ValueError` unless there is one label for each row of features, an index of a class."""
    if features.ndim != 2 or labels.shape != features.shape[:1]:
        raise ValueError(
            f"features must have shape (N, d) and labels (N,), got {tuple(features.shape)} and {tuple(labels.shape)}"
        )
    if labels.is_floating_point() or labels.is_complex():
        raise ValueError(f"labels must be integers, got {labels.dtype}")
    if len(labels) and not (labels.min() >= 0 and labels.max() < classes):
        found = f"{int(labels.min())} to {int(labels.max())}"
        raise ValueError(f"labels must be from 0 to {classes - 1}, got {found}")


@dataclass(frozen=True, eq=False)
class Moments:
    """What classifiers need of all tasks together: counts and means of their classes in order, and one covariance.

    `covariance` (d, d) is that within classes; all `images` that are in it have equal weight. All are float64.
    """

    counts: Tensor
    means: Tensor
    covariance: Tensor
    images: float

    @classmethod
    def of(cls, sums: Sequence[Sums]) -> "Moments":
        """Return the moments of tasks from their sums."""
        if not sums or len({part.dims for part in sums}) > 1:
            found = [part.dims for part in sums]
            raise ValueError(f"moments need sums of one or more tasks over the same features, got {found} features")
        counts = torch.cat([as_float64(part.counts) for part in sums])
        means = torch.cat([as_float64(part.means) for part in sums])
        scatter = torch.zeros_like(as_float64(sums[0].scatter))
        for part in sums:
            scatter += as_float64(part.scatter)
        images = max(float(counts.sum()), 1.0)
        return cls(counts, means, scatter / images, images)


def pack(matrix: Tensor) -> Tensor:
    """Return the upper triangle of a symmetric matrix as a vector."""
    rows, columns = torch.triu_indices(*matrix.shape, device=matrix.device).unbind()
    return matrix[rows, columns]


def unpack(values: Tensor, size: int) -> Tensor:
    """Return the symmetric matrix (size, size) whose upper triangle is `values`, as packed by `pack`."""
    expected = size * (size + 1) // 2
    if values.shape != (expected,):
        raise ValueError(f"a packed {size} x {size} covariance must have {expected} entries, got {values.numel()}")
    matrix = values.new_zeros(size, size)
    rows, columns = torch.triu_indices(size, size, device=values.device).unbind()
    matrix[rows, columns] = values
    matrix[columns, rows] = values
    return matrix
