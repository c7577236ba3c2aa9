"""Evidence: what every subnetwork says about the same images."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor


class Outputs(NamedTuple):
    """What one subnetwork says about some images: features (N, d) and logits (N, classes)."""

    features: Tensor
    logits: Tensor


class Evidence(Sequence[Outputs]):
    """The outputs of every subnetwork for the same images, each computed when first asked for."""

    def __init__(self, compute: Callable[[int], Outputs], tasks: int):
        self._compute = compute
        self._tasks = tasks
        self._known: dict[int, Outputs] = {}

    def __len__(self) -> int:
        return self._tasks

    def __getitem__(self, task: int) -> Outputs:  # pyright: ignore[reportIncompatibleMethodOverride]
        index = range(self._tasks)[task]
        if index not in self._known:
            self._known[index] = self._compute(index)
        return self._known[index]

    def __iter__(self) -> Iterator[Outputs]:
        return (self[task] for task in range(self._tasks))

    def until(self, tasks: int) -> "Evidence":
        """Return the evidence as it was when only the first `tasks` tasks were learned."""
        return Evidence(self.__getitem__, tasks)
