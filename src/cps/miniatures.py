"""Miniatures: the small networks of sealed subnetworks, made when first asked for and kept."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cps.crowd import Crowd, member
from cps.extraction import extracted
from cps.views import Look, passes

CROWDS = 4  # that are kept ready
SMALL = 2**24  # weights up to which a GPU takes longer to start the work on an image than to do it


class Miniatures:
    """Small networks by task, where they pay, as they predict in a crowd."""

    def __init__(
        self, backbone: nn.Module, tensors_of: Callable[[int], dict[str, Tensor]], sample: Callable[[], Tensor]
    ):
        """Take what turns the backbone into a task's, and a function that returns some pixels to try networks on."""
        self._backbone, self._tensors_of, self._sample = backbone, tensors_of, sample
        self._members: dict[int, nn.Module | None] = {}
        self._crowds: dict[tuple[int, ...], Crowd] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_crowds": {}}  # a CUDA graph cannot be copied

    def extracted(self, task: int) -> nn.Module | None:
        """Return the task's small network, made anew, or None where there can be none."""
        return extracted(self._backbone, self._tensors_of(task), self._sample())

    def pays(self, task: int) -> bool:
        """Say whether the task predicts by its small network.

        It does where that is less than half as large as the backbone; on a GPU also where it is not, but small enough
        that starting its layers one by one takes most of the time.
        """
        if task not in self._members:
            small, pixels = self.extracted(task), self._sample()
            limit = SMALL if pixels.is_cuda else 0
            pays = small is not None and _size(small) < max(_size(self._backbone) / 2, limit)
            self._members[task] = member(small, pixels) if small is not None and pays else None
        return self._members[task] is not None

    def crowd(self, tasks: tuple[int, ...]) -> Crowd:
        """Return the small networks of these tasks, which all pay, as a crowd; the last few are kept."""
        if tasks not in self._crowds:
            if len(self._crowds) == CROWDS:
                del self._crowds[next(iter(self._crowds))]
            self._crowds[tasks] = Crowd([self._members[task] for task in tasks])  # pyright: ignore[reportArgumentType]
        return self._crowds[tasks]

    def features(self, batches: Iterable[Tensor], looks: Mapping[int, Sequence[Look]]) -> dict[int, list[Tensor]]:
        """Return the features (looks, N, d) of each batch of pixels, by task, given the looks that each takes.

        All these tasks pay; those that take the same looks are a crowd.
        """
        askers = {
            taken: tuple(task for task, mine in looks.items() if tuple(mine) == taken)
            for taken in map(tuple, looks.values())
        }
        found: dict[int, list[Tensor]] = {task: [] for task in looks}
        for pixels in batches:
            for taken, tasks in askers.items():
                seen = [self.crowd(tasks)(turned) for turned in passes(pixels, taken)]  # by pass and task
                for task, parts in zip(tasks, zip(*seen, strict=True), strict=True):
                    found[task].append(torch.cat(parts).unflatten(0, (len(taken), len(pixels))))
        return found

    def forget(self) -> None:
        """Keep nothing."""
        self._members.clear()
        self._crowds.clear()

    def forget_images(self) -> None:
        """Keep no pixel of what was looked at; captured graphs hold some."""
        self._crowds.clear()


def _size(network: nn.Module) -> int:
    """Return how many weights and other parameters a network has."""
    return sum(parameter.numel() for parameter in network.parameters())
