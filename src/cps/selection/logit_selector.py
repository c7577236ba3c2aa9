"""The frame of selectors that score each task by the logits of its subnetwork, and keep nothing."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cps.network.outputs import Evidence, Outputs
from cps.network.subnetwork import Subnetwork
from cps.selection.base import Statistics
from cps.selection.groups import mean_by_group


class LogitSelector:
    """The task with the largest score, averaged over the group. A subclass has `score_logits`."""

    @property
    def name(self) -> str:
        """The selector's name."""
        return type(self).__name__

    def score_logits(self, logits: Tensor) -> Tensor:
        """Return the score (N,) of a task by its logits (N, classes)."""
        raise NotImplementedError

    def observe(
        self, subnetwork: Subnetwork, evidence: Evidence, labels: Tensor, earlier: Sequence[Statistics]
    ) -> Statistics:
        """Keep nothing."""
        return {}

    def __call__(self, evidence: Evidence, statistics: Sequence[Statistics], groups: Tensor) -> Tensor:
        """Return the mean score of each group and task."""
        return mean_by_group(self.score_images(evidence, self.precompute(statistics)), groups)

    def precompute(self, statistics: Sequence[Statistics]) -> list[Statistics]:
        """Return the statistics as they are."""
        return list(statistics)

    def score_images(self, evidence: Sequence[Outputs], precomputed: Sequence[Statistics]) -> Tensor:
        """Return the score of each image and task, shape (N, tasks)."""
        return torch.stack([self.score_logits(outputs.logits) for outputs in evidence], dim=1)
