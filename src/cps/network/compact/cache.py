"""Miniatures: the small networks of sealed subnetworks, made when first asked for and kept."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from cps.network.compact.extraction import extracted
from cps.network.compact.parallel_inference import Crowd, quickest
from cps.network.outputs import Outputs, concatenated
from cps.network.partition import in_channels_last
from cps.network.subnetwork import Subnetwork

CROWDS = 8  # that are kept ready
SMALL = 2**24  # weights up to which a GPU takes longer to start the work on an image than to do it


class Miniatures:
    """Small networks by task, where they pay, as they predict in a crowd."""

    def __init__(
        self, backbone: nn.Module, tensors_of: Callable[[int], dict[str, Tensor]], sample: Callable[[], Tensor]
    ):
        """Take what turns the backbone into a task's, and a function that returns some pixels to try networks on."""
        self._backbone, self._tensors_of, self._sample = backbone, tensors_of, sample
        self._networks: dict[int, nn.Module | None] = {}
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
        if task not in self._networks:
            small, pixels = self.extracted(task), self._sample()
            limit = SMALL if pixels.is_cuda else 0
            pays = small is not None and _size(small) < max(_size(self._backbone) / 2, limit)
            self._networks[task] = quickest(small, pixels) if small is not None and pays else None
        return self._networks[task] is not None

    def outputs(self, batches: Iterable[Tensor], subnetworks: Mapping[int, Subnetwork]) -> dict[int, Outputs]:
        """Return what tasks that pay say about batches of pixels, given the subnetwork of each.

        Those that look equally often are a crowd: how images are shared out, and so the bits, depends on that alone.
        """
        if not subnetworks:
            return {}
        groups: dict[int, dict[int, Subnetwork]] = {}
        for task, each in subnetworks.items():
            groups.setdefault(len(each.looks), {})[task] = each
        found: dict[int, list[Outputs]] = {task: [] for task in subnetworks}
        for pixels in batches:
            for looks, group in groups.items():
                for task, outputs in zip(group, self._crowd(group, looks)(pixels), strict=True):
                    found[task].append(outputs)
        return {task: concatenated(parts) for task, parts in found.items()}

    def _crowd(self, subnetworks: Mapping[int, Subnetwork], looks: int) -> Crowd:
        """Return the small networks of tasks that look equally often as a crowd; the last few crowds are kept."""
        tasks = tuple(subnetworks)
        crowd = self._crowds.pop(tasks, None)
        if crowd is None:
            onlookers = [Onlooker(cast(nn.Module, self._networks[task]), each) for task, each in subnetworks.items()]
            crowd = Crowd(onlookers, looks)
        self._crowds[tasks] = crowd  # as the last that was used
        if len(self._crowds) > CROWDS:
            del self._crowds[next(iter(self._crowds))]
        return crowd

    def forget(self) -> None:
        """Keep nothing."""
        self._networks.clear()
        self._crowds.clear()

    def forget_images(self) -> None:
        """Keep no pixel of what was looked at; captured graphs hold some."""
        self._crowds.clear()


@dataclass(frozen=True, eq=False)
class Onlooker:
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
