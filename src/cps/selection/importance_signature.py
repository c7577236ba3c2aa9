"""Select the task whose head is excited as it was in training: the paper's importance scores (eqs. 7 and 8)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cps.network.outputs import Evidence, Outputs
from cps.network.subnetwork import Subnetwork
from cps.selection.base import Statistics
from cps.selection.groups import mean_by_group
from cps.storage.settings_codec import NumericSettings, setting


@setting
@dataclass(frozen=True)
class ImportanceSignature(NumericSettings):
    """The task whose importance signature is closest to the group's.

    A signature is the signed mean of weight times feature over the head's connections. Since the head is sealed, the
    distance between two signatures is a weighted distance between mean features, so only those are kept. `norm` is 2
    as in the paper's text, or 1 divided by the number of connections as in its code, which makes heads of different
    sizes comparable.
    """

    norm: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("norm", self.norm in (1, 2), must="1 or 2")

    @property
    def name(self) -> str:
        """The selector's name."""
        return "ImportanceSignature" if self.norm == 2 else "ImportanceSignature-L1"

    def observe(
        self, subnetwork: Subnetwork, evidence: Evidence, labels: Tensor, earlier: Sequence[Statistics]
    ) -> Statistics:
        """Keep the mean feature vector and the norm of the head's weights for each feature."""
        weight = subnetwork.head["weight"]  # (classes, features)
        strength = weight.norm(p=self.norm, dim=0)
        if self.norm == 1:
            strength = strength / weight.numel()
        return {"mean": evidence[-1].features.mean(dim=0), "strength": strength}

    def __call__(self, evidence: Evidence, statistics: Sequence[Statistics], groups: Tensor) -> Tensor:
        """Return minus the distance between the signature of each group and that of each task."""
        grouped = [Outputs(mean_by_group(outputs.features, groups), outputs.logits) for outputs in evidence]
        return self.score_images(grouped, self.precompute(statistics))

    def precompute(self, statistics: Sequence[Statistics]) -> list[Statistics]:
        """Return the statistics as they are."""
        return list(statistics)

    def score_images(self, evidence: Sequence[Outputs], precomputed: Sequence[Statistics]) -> Tensor:
        """Return minus the distance between the signature of each image and that of each task, shape (N, tasks)."""
        pairs = zip(evidence, precomputed, strict=True)
        changes = [(outputs.features - known["mean"]) * known["strength"] for outputs, known in pairs]
        return torch.stack([-change.norm(p=self.norm, dim=1) for change in changes], dim=1)
