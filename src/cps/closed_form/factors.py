"""The scatter of each class on its own, in little memory, so that a class can be taken out of the sums again."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from cps.closed_form.sums import Sums
from cps.runtime.devices import as_float64

ROUNDING = 1e-12  # relative to the largest entry, below which a row is zero but for rounding


@dataclass(frozen=True, eq=False)
class ClassFactors:
    """For each class a triangular matrix R whose product R^T R is the scatter of the class, all below one another.

    `rows` (r, d) has at most as many rows of a class as it has images or features; `classes` (r,) is the class of each.
    With few images they take less memory than one (d, d) matrix, and they hold nothing that the scatter does not.
    """

    rows: Tensor
    classes: Tensor

    @classmethod
    def of(cls, parts: Iterable[tuple[Tensor, Tensor]], means: Tensor) -> "ClassFactors":
        """Return the factors of features (N, d) with labels (N,), given the mean features of the classes."""
        parts = list(parts)
        features = as_float64(torch.cat([features for features, _ in parts]))
        labels = torch.cat([labels for _, labels in parts]).to(features.device, torch.long)
        return cls(features - means[labels], labels)._triangular()

    def grown(self, other: "ClassFactors", before: Sums, added: Sums) -> "ClassFactors":
        """Return the factors of the images of both, whose sums were `before` and are to be `added`."""
        share = before.counts * added.counts / (before.counts + added.counts).clamp(min=1)
        between = share.sqrt()[:, None] * (added.means - before.means)  # (classes, d)
        classes = torch.arange(len(between), device=between.device)
        rows = torch.cat([self.rows, other.rows, between])
        return ClassFactors(rows, torch.cat([self.classes, other.classes, classes]))._triangular()

    def without_class(self, index: int) -> "ClassFactors":
        """Return the factors of the other classes; later classes move down by one."""
        stay = self.classes != index
        return ClassFactors(self.rows[stay], self.classes[stay] - (self.classes[stay] > index).long())

    @property
    def scatter(self) -> Tensor:
        """The scatter (d, d) of all classes together."""
        return self.rows.T @ self.rows

    def _triangular(self) -> "ClassFactors":
        """Return the same scatter as triangular matrices, which depend on nothing else."""
        factors, classes = [self.rows[:0]], [self.classes[:0]]
        for index in self.classes.unique().tolist():
            own = self.rows[self.classes == index]
            factor = torch.linalg.qr(own, mode="r").R
            largest = factor.abs().amax(dim=1)
            factor = factor[largest > ROUNDING * largest.max()]  # n centred images have n - 1 dimensions
            factors.append(factor)
            classes.append(self.classes.new_full((len(factor),), index))
        return ClassFactors(torch.cat(factors), torch.cat(classes))
