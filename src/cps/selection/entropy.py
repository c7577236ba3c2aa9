"""Select the task whose subnetwork is the most certain of its classes."""

from dataclasses import dataclass

from torch import Tensor

from cps.selection.logit_selector import LogitSelector
from cps.storage.settings_codec import setting


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy (N,) of the softmax of logits (N, classes), in nats."""
    log_probabilities = logits.float().log_softmax(dim=1)
    return -(log_probabilities.exp() * log_probabilities).sum(dim=1)


@setting
@dataclass(frozen=True)
class Entropy(LogitSelector):
    """The task whose outputs have the smallest entropy, averaged over the group (SupSup, all tasks compared)."""

    def score_logits(self, logits: Tensor) -> Tensor:
        """Return minus the entropy of each image."""
        return -entropy(logits)
