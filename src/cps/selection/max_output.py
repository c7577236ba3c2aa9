"""Select the task with the largest logit, as in the paper's first selector."""

from dataclasses import dataclass

from torch import Tensor

from cps.selection.logit_selector import LogitSelector
from cps.storage.settings_codec import setting


@setting
@dataclass(frozen=True)
class MaxOutput(LogitSelector):
    """The task whose head gives the largest logit, averaged over the group (eq. 3)."""

    def score_logits(self, logits: Tensor) -> Tensor:
        """Return the largest logit of each image."""
        return logits.amax(dim=1)
