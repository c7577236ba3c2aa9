"""Outputs of subnetworks: features and logits, for one subnetwork or for all of them (`Evidence`)."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from cps.closed_form.spaces import Space

CLOSE = 1e-3  # default tolerance of `are_close`, relative to the largest feature


class Outputs(NamedTuple):
    """Outputs of one subnetwork for N images: features (N, d) and logits (N, classes)."""

    features: Tensor
    logits: Tensor


class Evidence(Sequence[Outputs]):
    """What is known about some images: the outputs of every subnetwork, and features in spaces that no task owns.

    Everything is computed on demand and at most once. `forward(tasks)` returns the outputs of the given subnetworks,
    `features(space)` the features (N, d) in a space, and `forward_some` the outputs of subnetworks for a few images
    each, given as indices by task. Computing several subnetworks together is faster than one by one, so call `compute`
    first, or iterate.
    """

    def __init__(
        self,
        forward: Callable[[Sequence[int]], Sequence[Outputs]],
        tasks: int,
        features: Callable[[Space | None], Tensor] | None = None,
        forward_some: Callable[[Mapping[int, Tensor]], Mapping[int, Outputs]] | None = None,
        images: int | None = None,
    ):
        self._forward, self._forward_some = forward, forward_some
        self._tasks, self._images = tasks, images
        self._features = features
        self._known: dict[int, Outputs] = {}
        self._some: dict[int, tuple[Tensor, Outputs]] = {}  # indices of images in order, and their outputs
        self._derived: dict[Hashable, Any] = {}

    @classmethod
    def of(cls, outputs: Sequence[Outputs], features: Callable[[Space | None], Tensor] | None = None) -> "Evidence":
        """Return evidence made of outputs that are already computed."""
        return cls(lambda tasks: [outputs[task] for task in tasks], len(outputs), features)

    def __len__(self) -> int:
        return self._tasks

    @property
    def num_images(self) -> int:
        """The number of images."""
        return len(self[0].logits) if self._images is None else self._images

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

    def compute_some(self, needed: Tensor) -> None:
        """Run each subnetwork for the images that need it: those marked in `needed`, a bool tensor (N, tasks)."""
        needed = needed.cpu()
        self.compute(needed.all(dim=0).nonzero()[:, 0].tolist())
        tasks, images = needed.T.nonzero().unbind(dim=1)
        self._run_missing(split_by_task(images, tasks))

    def some(self, task: int, images: Tensor) -> Outputs:
        """Return the outputs of a subnetwork for some of the images, given as indices."""
        outputs, rows = self._find(task, images.cpu())
        return Outputs(*(part[rows.to(part.device)] for part in outputs))

    def logits_of(self, images: Tensor, tasks: Tensor) -> Tensor:
        """Return the logits (n, most classes) of pairs of an image and a task, given as indices.

        The rows of a task with fewer classes than others end in minus infinity.
        """
        images, tasks = images.cpu(), tasks.cpu()
        order = tasks.argsort(stable=True)
        parts = []
        for task, own in split_by_task(images[order], tasks[order]).items():
            outputs, rows = self._find(task, own)
            parts.append(outputs.logits[rows.to(outputs.logits.device)])
        return pad_rows(parts)[order.argsort().to(parts[0].device)]

    def _find(self, task: int, images: Tensor) -> tuple[Outputs, Tensor]:
        """Return outputs of a subnetwork, and their rows that belong to the images; run it where it has not run."""
        if task in self._some:
            known, outputs = self._some[task]
            rows = torch.searchsorted(known, images).clamp(max=len(known) - 1)
            if torch.equal(known[rows], images):
                return outputs, rows
        self._run_missing({task: images.unique()})
        return (self._known[task], images) if task in self._known else self._find(task, images)

    def _run_missing(self, images: Mapping[int, Tensor]) -> None:
        """Run each subnetwork for those of the images, in order, that it has not run for yet; keep them in order."""
        missing = {task: indices for task, indices in images.items() if task not in self._known}
        for task in missing.keys() & self._some.keys():
            missing[task] = missing[task][~torch.isin(missing[task], self._some[task][0])]
        missing = {task: indices for task, indices in missing.items() if len(indices)}
        if self._forward_some is None:
            self.compute(list(missing))
            return
        for task, outputs in (self._forward_some(missing) if missing else {}).items():
            indices = missing[task]
            if task in self._some:
                known, before = self._some[task]
                indices, order = torch.cat([known, indices]).sort()
                both = zip(before, outputs, strict=True)
                outputs = Outputs(*(torch.cat(parts)[order.to(parts[0].device)] for parts in both))
            self._some[task] = indices, outputs

    def ran(self, task: int) -> Tensor:
        """Return the indices of the images that a subnetwork has run for."""
        if task in self._known:
            return torch.arange(self.num_images)
        return self._some[task][0] if task in self._some else torch.empty(0, dtype=torch.long)

    def features(self, space: Space | None) -> Tensor:
        """Return the features (N, d) of the images in a space that no task owns; None is the default space."""

        def compute() -> Tensor:
            if self._features is None:
                raise ValueError("this evidence has no images; use `Learner.evidence`, which has")
            return self._features(space)

        return self.derived(space, compute)

    def derived(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """Return `compute()`, which is called once for each key."""
        if key not in self._derived:
            self._derived[key] = compute()
        return self._derived[key]

    def of_images(self, images: Tensor) -> "Evidence":
        """Return the evidence of some of the images, given as indices in order."""

        def features(space: Space | None) -> Tensor:
            known = self.features(space)
            return known[images.to(known.device)]

        return Evidence(lambda tasks: [self.some(task, images) for task in tasks], self._tasks, features)

    def without_images(self, images: int) -> "Evidence":
        """Return what is known so far about that many images, without the images: nothing more can be computed."""

        def refuse(tasks: Sequence[int]) -> list[Outputs]:
            raise ValueError(f"the subnetworks of the tasks {list(tasks)} have not run; use `Learner.evidence`")

        known = Evidence(refuse, self._tasks, images=images)
        known._known, known._some, known._derived = {**self._known}, {**self._some}, {**self._derived}
        return known

    def first(self, tasks: int) -> "Evidence":
        """Return the evidence of the first `tasks` subnetworks, as it was when only they were learned."""
        return Evidence(self.compute, tasks, None if self._features is None else self.features)


def pair_outputs(parts: Sequence[Tensor]) -> list[Outputs]:
    """Return [features, logits, features, logits, ...] of several subnetworks as a list of outputs."""
    return [Outputs(*both) for both in zip(parts[::2], parts[1::2], strict=True)]


def split_by_task(values: Tensor, tasks: Tensor) -> dict[int, Tensor]:
    """Return the values (n, ...) of each task, given the task of each value in ascending order."""
    numbers, counts = tasks.unique_consecutive(return_counts=True)
    return dict(zip(numbers.tolist(), values.split(counts.tolist()), strict=True))


def join_tasks(values: Mapping[int, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the values (n,) of all tasks in turn, and the task of each."""
    parts = [torch.empty(0, dtype=torch.long), *values.values()]
    counts = torch.tensor([len(part) for part in values.values()], dtype=torch.long)
    return torch.cat(parts), torch.tensor([*values], dtype=torch.long).repeat_interleave(counts)


def pad_rows(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate matrices (n, columns), those with fewer columns than others padded with minus infinity."""
    columns = {part.shape[1] for part in parts}
    if len(columns) > 1:
        parts = [F.pad(part, (0, max(columns) - part.shape[1]), value=-torch.inf) for part in parts]
    return torch.cat([*parts])


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
