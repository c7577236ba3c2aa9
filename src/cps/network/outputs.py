"""Outputs of subnetworks: features and logits, for one subnetwork or for all of them (`Evidence`)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, overload

import torch
from torch import Tensor

CLOSE = 1e-3  # default tolerance of `are_close`, relative to the largest feature


class Outputs(NamedTuple):
    """Outputs of one subnetwork for N images: features (N, d) and logits (N, classes)."""

    features: Tensor
    logits: Tensor


class Evidence(Sequence[Outputs]):
    """The outputs of every subnetwork for the same images, computed on demand.

    `forward(tasks)` returns the outputs of the given subnetworks. Each subnetwork runs at most once. Computing
    several together is faster than one by one, so call `compute` first, or iterate.
    """

    def __init__(self, forward: Callable[[Sequence[int]], Sequence[Outputs]], tasks: int):
        self._forward = forward
        self._tasks = tasks
        self._known: dict[int, Outputs] = {}

    @classmethod
    def of(cls, outputs: Sequence[Outputs]) -> "Evidence":
        """Return evidence made of outputs that are already computed."""
        return cls(lambda tasks: [outputs[task] for task in tasks], len(outputs))

    def __len__(self) -> int:
        return self._tasks

    @overload
    def __getitem__(self, index: int) -> Outputs: ...
    @overload
    def __getitem__(self, index: slice) -> list[Outputs]: ...
    def __getitem__(self, index: int | slice) -> Outputs | list[Outputs]:
        tasks = range(self._tasks)[index]
        return self.compute(tasks) if isinstance(tasks, range) else self.compute([tasks])[0]

    def __iter__(self) -> Iterator[Outputs]:
        return iter(self.compute())

    def compute(self, tasks: Sequence[int] | None = None) -> list[Outputs]:
        """Run the subnetworks of `tasks` (default: all) that have not run yet, and return their outputs."""
        tasks = range(self._tasks) if tasks is None else tasks
        missing = [task for task in tasks if task not in self._known]
        if missing:
            self._known.update(zip(missing, self._forward(missing), strict=True))
        return [self._known[task] for task in tasks]

    def first(self, tasks: int) -> "Evidence":
        """Return the evidence of the first `tasks` subnetworks, as it was when only they were learned."""
        return Evidence(self.compute, tasks)


def pair_outputs(parts: Sequence[Tensor]) -> list[Outputs]:
    """Return [features, logits, features, logits, ...] of several subnetworks as a list of outputs."""
    return [Outputs(*both) for both in zip(parts[::2], parts[1::2], strict=True)]


def concatenate(parts: Sequence[Outputs]) -> Outputs:
    """Concatenate the outputs of one subnetwork for consecutive batches."""
    return parts[0] if len(parts) == 1 else Outputs(*map(torch.cat, zip(*parts, strict=True)))


def finite_outputs(outputs: Mapping[int, Outputs]) -> dict[int, Outputs]:
    """Return the outputs, by task, whose features are all finite. One transfer from the GPU serves all of them."""
    if not outputs:
        return {}
    sums = torch.stack([each.features.sum() for each in outputs.values()]).isfinite().tolist()
    return {task: each for (task, each), is_finite in zip(outputs.items(), sums, strict=True) if is_finite}


def are_close(features: Tensor, expected: Tensor, tolerance: float = CLOSE) -> bool:
    """Return True if no feature differs by more than `tolerance` times the largest expected one."""
    return bool((features - expected).abs().max() <= tolerance * expected.abs().max())
