"""Select the task with the largest logit, as in the paper's first selector."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cps.network.outputs import Evidence, Outputs
from cps.network.subnetwork import Subnetwork
from cps.selection.base import Statistics
from cps.selection.groups import mean_by_group
from cps.storage.settings_codec import setting


@setting
@dataclass(frozen=True)
class MaxOutput:
    """The task whose head gives the largest logit, averaged over the group (eq. 3)."""

    @property
    def name(self) -> str:
        """The selector's name."""
        return "MaxOutput"

    def observe(
        self, subnetwork: Subnetwork, evidence: Evidence, labels: Tensor, earlier: Sequence[Statistics]
    ) -> Statistics:
        """Keep nothing."""
        return {}

    def __call__(self, evidence: Evidence, statistics: Sequence[Statistics], groups: Tensor) -> Tensor:
        """Return the mean maximum logit of each group and task."""
        return mean_by_group(self.score_images(evidence, self.precompute(statistics)), groups)

    def precompute(self, statistics: Sequence[Statistics]) -> list[Statistics]:
        """Return the statistics as they are."""
        return list(statistics)

    def score_images(self, evidence: Sequence[Outputs], precomputed: Sequence[Statistics]) -> Tensor:
        """Return the maximum logit of each image and task, shape (N, tasks)."""
        return torch.stack([outputs.logits.amax(1) for outputs in evidence], dim=1)
