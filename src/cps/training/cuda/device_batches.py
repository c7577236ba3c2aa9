"""The feed: a task's images on the device, the order in which an epoch reads them, and what is ready for the next step.

Reading a batch needs no word from the CPU, so it can be part of a captured step, beside the work on the one before.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cps.data.examples import TensorExamples

Show = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # images, labels, random numbers -> pixels, labels


@dataclass(frozen=True)
class EpochPlan:
    """An epoch of one process: the indices of each batch, and what goes with them.

    `uniform` has a row of random numbers for each example, `factors` are those of the learning rate at each step, and
    `shares` weigh the process's part of each batch. `pace` is how far scores move in a step at the full rate.
    """

    order: Sequence[Tensor]
    uniform: Tensor
    factors: Sequence[float]
    shares: Sequence[float]
    pace: float = 0.0


class DeviceBatches:
    """Examples in memory that stays where it is when others of the same shape take their place.

    `show` makes of them what a classifier sees, by so many random `draws` for each.
    """

    def __init__(self, examples: TensorExamples, show: Show, draws: int):
        device = examples.images.device
        self._images, self._targets = torch.empty_like(examples.images), torch.empty_like(examples.targets)
        self._order = torch.zeros(len(examples), dtype=torch.long, device=device)
        self._uniform = torch.zeros(len(examples), draws, dtype=torch.float32, device=device)
        self._next = torch.zeros(1, dtype=torch.long, device=device)
        self._span = torch.arange(len(examples), device=device)
        self._show = show
        self._ready: dict[int, tuple[Tensor, Tensor]] = {}  # by how many examples they are

    def fits(self, examples: TensorExamples) -> bool:
        """Say whether these examples can take the place of the ones before."""
        same = self._images.shape == examples.images.shape and self._images.dtype == examples.images.dtype
        return same and self._images.device == examples.images.device

    def load(self, examples: TensorExamples) -> None:
        """Take up other examples."""
        self._images.copy_(examples.images)
        self._targets.copy_(examples.targets)

    def start(self, order: Tensor, uniform: Tensor) -> None:
        """Start an epoch: the indices of its examples in turn, and the random numbers of all examples."""
        self._order[: len(order)].copy_(order)
        self._uniform.copy_(uniform)
        self._next.zero_()

    def read(self, size: int) -> tuple[Tensor, Tensor]:
        """Return pixels and labels of the next examples."""
        indices = self._order[self._next + self._span[:size]]
        self._next += size
        return self._show(self._images[indices], self._targets[indices], self._uniform[indices])

    def keep(self, size: int, shown: tuple[Tensor, Tensor]) -> None:
        """Keep so many examples ready, in memory that stays where it is."""
        if size not in self._ready:
            self._ready[size] = torch.empty_like(shown[0]), torch.empty_like(shown[1])
        for place, value in zip(self._ready[size], shown, strict=True):
            place.copy_(value)

    def ready(self, size: int) -> tuple[Tensor, Tensor]:
        """Return pixels and labels of as many examples as were kept ready."""
        return self._ready[size]

    def forget(self) -> None:
        """Keep no image."""
        self._images.zero_()
        self._targets.zero_()
        for pixels, labels in self._ready.values():
            pixels.zero_()
            labels.zero_()
