"""Pruners: functions from a trained backbone and its masks to smaller masks."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn

from cps.network.masks import Masks


class Pruner(Protocol):
    """Decides which connections stay. It must change neither the backbone nor the masks it is given."""

    def __call__(self, backbone: nn.Module, masks: Masks, batches: Sequence[Tensor]) -> Masks:
        """Return masks that are subsets of `masks`.

        The backbone's weights are live, and zero where the masks are off. `batches` holds pixels of the task's
        training images on the backbone's device.
        """
        ...
