"""Miniatures: the small networks of sealed subnetworks, made when first asked for and kept."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from cps.network.compact.extraction import extracted
from cps.network.compact.parallel_inference import ParallelInference, fastest_form
from cps.network.outputs import Outputs, concatenate
from cps.network.partition import in_channels_last
from cps.network.subnetwork import Subnetwork

MAX_CACHED = 8  # that are kept ready
SMALL = 2**24  # weights up to which a GPU takes longer to start the work on an image than to do it


class CompactCache:
    """Small networks by task, where they pay, as they predict in a crowd."""

    def __init__(
        self, backbone: nn.Module, tensors_of: Callable[[int], dict[str, Tensor]], sample: Callable[[], Tensor]
    ):
        """Take what turns the backbone into a task's, and a function that returns some pixels to try networks on."""
        self._backbone, self._tensors_of, self._sample = backbone, tensors_of, sample
        self._networks: dict[int, nn.Module | None] = {}
        self._parallel: dict[tuple[int, ...], ParallelInference] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_parallel": {}}  # a CUDA graph cannot be copied

    def extracted(self, task: int) -> nn.Module | None:
        """Return the task's small network, made anew, or None where there can be none."""
        return extracted(self._backbone, self._tensors_of(task), self._sample())

    def is_worthwhile(self, task: int) -> bool:
        """Say whether the task predicts by its small network.

        It does where that is less than half as large as the backbone; on a GPU also where it is not, but small enough
        that starting its layers one by one takes most of the time.
        """
        if task not in self._networks:
            small, pixels = self.extracted(task), self._sample()
            limit = SMALL if pixels.is_cuda else 0
            is_worthwhile = small is not None and _size(small) < max(_size(self._backbone) / 2, limit)
            self._networks[task] = fastest_form(small, pixels) if small is not None and is_worthwhile else None
        return self._networks[task] is not None

    def outputs(self, batches: Iterable[Tensor], subnetworks: Mapping[int, Subnetwork]) -> dict[int, Outputs]:
        """Return what tasks that pay say about batches of pixels, given the subnetwork of each.

        Those that look equally often are a crowd: how images are shared out, and so the bits, depends on that alone.
        """
        if not subnetworks:
            return {}
        groups: dict[int, dict[int, Subnetwork]] = {}
        for task, each in subnetworks.items():
            groups.setdefault(len(each.views), {})[task] = each
        found: dict[int, list[Outputs]] = {task: [] for task in subnetworks}
        for pixels in batches:
            for views, group in groups.items():
                for task, outputs in zip(group, self._parallel_of(group, views)(pixels), strict=True):
                    found[task].append(outputs)
        return {task: concatenate(parts) for task, parts in found.items()}

    def _parallel_of(self, subnetworks: Mapping[int, Subnetwork], views: int) -> ParallelInference:
        """Return the small networks of tasks that look equally often as a crowd; the last few crowds are kept."""
        tasks = tuple(subnetworks)
        parallel = self._parallel.pop(tasks, None)
        if parallel is None:
            onlookers = [
                CompactSubnetwork(cast(nn.Module, self._networks[task]), each) for task, each in subnetworks.items()
            ]
            parallel = ParallelInference(onlookers, views)
        self._parallel[tasks] = parallel  # as the last that was used
        if len(self._parallel) > MAX_CACHED:
            del self._parallel[next(iter(self._parallel))]
        return parallel

    def forget(self) -> None:
        """Keep nothing."""
        self._networks.clear()
        self._parallel.clear()

    def release_images(self) -> None:
        """Keep no pixel of what was looked at; captured graphs hold some."""
        self._parallel.clear()


@dataclass(frozen=True, eq=False)
class CompactSubnetwork:
    """A small network with the looks and the head of its subnetwork."""

    network: nn.Module
    subnetwork: Subnetwork

    def look(self, pixels: Tensor) -> Tensor:
        """Return features at all looks."""
        return self.subnetwork.look(pixels, self._features)

    def say(self, seen: Tensor) -> Outputs:
        """Return the outputs for what was seen."""
        return self.subnetwork.say(seen)

    def _features(self, pixels: Tensor) -> Tensor:
        return self.network(in_channels_last(pixels))  # turned images are not so any more


def _size(network: nn.Module) -> int:
    """Return how many weights and other parameters a network has."""
    return sum(parameter.numel() for parameter in network.parameters())
