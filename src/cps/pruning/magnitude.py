"""Magnitude pruning: the simplest pruner, and an example of what a pruner is."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from cps.network.masks import Masks, topk_mask
from cps.storage.settings_codec import NumericSettings, setting


@setting
@dataclass(frozen=True)
class Magnitude(NumericSettings):
    """Keep the connections with the largest absolute weight: the share `keep` of those still on, per layer."""

    keep: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("keep", 0 < self.keep <= 1, must="in (0, 1]")

    def __call__(self, backbone: nn.Module, masks: Masks, batches: Sequence[Tensor]) -> Masks:
        """Return masks with the share `keep` of the connections, at least one per layer."""
        weights = dict(backbone.named_parameters())
        numbers = {name: max(1, round(self.keep * int(mask.sum()))) for name, mask in masks.items()}
        return {name: topk_mask(weights[name], mask, numbers[name]) for name, mask in masks.items()}
