"""Evidence: what every subnetwork says about the same images."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, overload

import torch
from torch import Tensor

CLOSE = 1e-3  # how far features may be off, of the largest


class Outputs(NamedTuple):
    """What one subnetwork says about some images: features (N, d) and logits (N, classes)."""

    features: Tensor
    logits: Tensor


class Evidence(Sequence[Outputs]):
    """The outputs of every subnetwork for the same images, computed when first asked for.

    `compute` returns the outputs of the subnetworks it is given. Those of several cost less together than one by
    one: iterate over the evidence, or `ask` first.
    """

    def __init__(self, compute: Callable[[Sequence[int]], Sequence[Outputs]], tasks: int):
        self._compute = compute
        self._tasks = tasks
        self._known: dict[int, Outputs] = {}

    def __len__(self) -> int:
        return self._tasks

    @overload
    def __getitem__(self, index: int) -> Outputs: ...
    @overload
    def __getitem__(self, index: slice) -> list[Outputs]: ...
    def __getitem__(self, index: int | slice) -> Outputs | list[Outputs]:
        tasks = range(self._tasks)[index]
        return self.ask(tasks) if isinstance(tasks, range) else self.ask([tasks])[0]

    def __iter__(self) -> Iterator[Outputs]:
        return iter(self.ask(range(self._tasks)))

    def ask(self, tasks: Sequence[int]) -> list[Outputs]:
        """Return the outputs of several subnetworks."""
        missing = [task for task in tasks if task not in self._known]
        if missing:
            self._known.update(zip(missing, self._compute(missing), strict=True))
        return [self._known[task] for task in tasks]

    def until(self, tasks: int) -> "Evidence":
        """Return the evidence as it was when only the first `tasks` tasks were learned."""
        return Evidence(self.ask, tasks)


def pair_outputs(parts: Sequence[Tensor]) -> list[Outputs]:
    """Return features, logits, features, ... of one subnetwork after the other as outputs."""
    return [Outputs(*both) for both in zip(parts[::2], parts[1::2], strict=True)]


def concatenate(parts: Sequence[Outputs]) -> Outputs:
    """Return outputs for images, one after the other, as outputs for all of them."""
    return parts[0] if len(parts) == 1 else Outputs(*map(torch.cat, zip(*parts, strict=True)))


def finite(found: Mapping[int, Outputs]) -> dict[int, Outputs]:
    """Return the outputs whose features are all numbers, by task; asked in one go, since a GPU's answer takes time."""
    if not found:
        return {}
    sums = torch.stack([outputs.features.sum() for outputs in found.values()]).isfinite().tolist()
    return {task: outputs for (task, outputs), is_finite in zip(found.items(), sums, strict=True) if is_finite}


def are_close(found: Tensor, expected: Tensor, share: float = CLOSE) -> bool:
    """Say whether features are off by no more than a share of the largest."""
    return bool((found - expected).abs().max() <= share * expected.abs().max())
