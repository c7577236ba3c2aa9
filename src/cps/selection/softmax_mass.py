"""Select the task whose classes have the largest part of the softmax over all classes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cps.network.outputs import Evidence
from cps.network.subnetwork import Statistics, Subnetwork
from cps.selection.groups import mean_by_group
from cps.storage.settings_codec import NumericSettings, setting


@setting
@dataclass(frozen=True)
class SoftmaxMass(NumericSettings):
    """The task with the largest mean log probability: right for a head that was trained for all classes together.

    The probability of a task is that of all its classes together, in the softmax over the classes of all tasks.
    """

    @property
    def name(self) -> str:
        """The selector's name."""
        return "SoftmaxMass"

    def observe(
        self, subnetwork: Subnetwork, evidence: Evidence, labels: Tensor, earlier: Sequence[Statistics]
    ) -> Statistics:
        """Keep nothing."""
        return {}

    def __call__(self, evidence: Evidence, statistics: Sequence[Statistics], groups: Tensor) -> Tensor:
        """Return the score of each task, averaged over each group."""
        masses = torch.stack([outputs.logits.float().logsumexp(dim=1) for outputs in evidence], dim=1)
        return mean_by_group(masses.log_softmax(dim=1), groups)
