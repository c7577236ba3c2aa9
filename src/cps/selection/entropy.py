"""Select the task whose subnetwork is the most certain of its classes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cps.network.outputs import Evidence, Outputs
from cps.network.subnetwork import Statistics, Subnetwork
from cps.selection.groups import mean_by_group
from cps.storage.settings_codec import setting


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy (N,) of the softmax of logits (N, classes), in nats."""
    log_probabilities = logits.float().log_softmax(dim=1)
    return -(log_probabilities.exp() * log_probabilities).sum(dim=1)


@setting
@dataclass(frozen=True)
class Entropy:
    """The task whose outputs have the smallest entropy, averaged over the group (SupSup, all tasks compared)."""

    @property
    def name(self) -> str:
        """The selector's name."""
        return "Entropy"

    def observe(
        self, subnetwork: Subnetwork, evidence: Evidence, labels: Tensor, earlier: Sequence[Statistics]
    ) -> Statistics:
        """Keep nothing."""
        return {}

    def __call__(self, evidence: Evidence, statistics: Sequence[Statistics], groups: Tensor) -> Tensor:
        """Return minus the mean entropy of each group and task."""
        return mean_by_group(self.score_images(evidence, self.precompute(statistics)), groups)

    def precompute(self, statistics: Sequence[Statistics]) -> list[Statistics]:
        """Return the statistics as they are."""
        return list(statistics)

    def score_images(self, evidence: Sequence[Outputs], precomputed: Sequence[Statistics]) -> Tensor:
        """Return minus the entropy of each image and task, shape (N, tasks)."""
        return torch.stack([-entropy(outputs.logits) for outputs in evidence], dim=1)
