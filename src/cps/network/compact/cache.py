"""Cache of the compact networks of sealed subnetworks, created on first use."""

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, fx, nn

from cps.network.compact.extraction import extract_compact
from cps.network.compact.parallel_inference import ParallelInference, convert_for_device, run_each
from cps.network.compact.stacked_inference import StackedInference
from cps.network.outputs import Outputs, concatenate
from cps.network.partition import as_channels_last
from cps.network.subnetwork import Subnetwork

log = logging.getLogger(__name__)

MAX_CACHED = 8  # combinations of tasks whose ParallelInference is kept
LAUNCH_BOUND = 2**24  # parameters below which a GPU takes longer to launch a network's kernels than to run them
OVERHEAD_BOUND = 2**16  # parameters below which a CPU takes longer to put masked weights into the backbone


class CompactCache:
    """The compact networks by task, where they are worthwhile, and their parallel inference."""

    def __init__(
        self,
        backbone: nn.Module,
        tensors_of: Callable[[int], dict[str, Tensor]],
        sample: Callable[[], Tensor],
        precision: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        """Store the backbone and three functions.

        `tensors_of(task)` returns the tensors that turn the backbone into the task's network. `sample()` returns some
        pixels on which compact networks are compared with the backbone. `precision()` returns the context in which they
        compute.
        """
        self._backbone, self._tensors_of, self._sample, self._precision = backbone, tensors_of, sample, precision
        self._networks: dict[int, nn.Module | None] = {}
        self._logged: set[str] = set()
        self._parallel: dict[tuple[int, ...], ParallelInference] = {}
        self._stacked = StackedInference(sample)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_parallel": {}}  # a CUDA graph cannot be copied

    def extract(self, task: int) -> fx.GraphModule | None:
        """Return a new compact network of the task, or None if it cannot be extracted."""
        network, obstacle = extract_compact(self._backbone, self._tensors_of(task), self._sample())
        if obstacle and obstacle not in self._logged:
            log.info("subnetworks keep all channels: %s", obstacle)
            self._logged.add(obstacle)
        return network

    def is_worthwhile(self, task: int) -> bool:
        """Return True if the task predicts with its compact network.

        It does if that has less than half the parameters of the backbone. It also does if the network is so small that
        most of the time is not spent on computing: on a GPU on launching its kernels one by one, on a CPU on putting
        the task's masked weights into the backbone.
        """
        if task not in self._networks:
            compact, pixels = self.extract(task), self._sample()
            limit = LAUNCH_BOUND if pixels.is_cuda else OVERHEAD_BOUND
            is_small = compact is not None and _num_parameters(compact) < max(
                _num_parameters(self._backbone) / 2, limit
            )
            self._networks[task] = convert_for_device(compact, pixels) if compact is not None and is_small else None
        return self._networks[task] is not None

    def outputs(self, batches: Iterable[Tensor], subnetworks: Mapping[int, Subnetwork]) -> dict[int, Outputs]:
        """Return the outputs of tasks with worthwhile compact networks for batches of pixels.

        Tasks with equally many views run together: the number of views alone decides how images are split into
        batches, and so the bits.
        """
        if not subnetworks:
            return {}
        groups: dict[int, dict[int, Subnetwork]] = {}
        for task, subnetwork in subnetworks.items():
            groups.setdefault(len(subnetwork.views), {})[task] = subnetwork
        parts: dict[int, list[Outputs]] = {task: [] for task in subnetworks}
        for pixels in batches:
            for num_views, group in groups.items():
                for task, outputs in zip(group, self._parallel_inference(group, num_views)(pixels), strict=True):
                    parts[task].append(outputs)
        return {task: concatenate(of_task) for task, of_task in parts.items()}

    def outputs_for(self, pixels: Mapping[int, Tensor], subnetworks: Mapping[int, Subnetwork]) -> dict[int, Outputs]:
        """Return the outputs of tasks with worthwhile compact networks, each for pixels of its own."""
        branches = {task: self._branch(task, each) for task, each in subnetworks.items()}
        with self._precision():
            found = self._stacked.outputs(branches, pixels)
        others = {task: branch for task, branch in branches.items() if task not in found}
        jobs = [(branch, len(branch.subnetwork.views), pixels[task]) for task, branch in others.items()]
        return found | dict(zip(others, run_each(jobs), strict=True))

    def _parallel_inference(self, subnetworks: Mapping[int, Subnetwork], num_views: int) -> ParallelInference:
        """Return the parallel inference of tasks with equally many views; the most recently used ones are kept."""
        tasks = tuple(subnetworks)
        parallel = self._parallel.pop(tasks, None)
        if parallel is None:
            parallel = ParallelInference([self._branch(*each) for each in subnetworks.items()], num_views)
        self._parallel[tasks] = parallel  # at the end: the most recently used
        if len(self._parallel) > MAX_CACHED:
            del self._parallel[next(iter(self._parallel))]
        return parallel

    def _branch(self, task: int, subnetwork: Subnetwork) -> "CompactSubnetwork":
        return CompactSubnetwork(cast(nn.Module, self._networks[task]), subnetwork, self._precision)

    def clear(self) -> None:
        """Remove everything; compact networks are created again on next use."""
        self._networks.clear()
        self._parallel.clear()
        self._stacked = StackedInference(self._sample)

    def release_images(self) -> None:
        """Remove captured CUDA graphs, which hold the pixels of the last batch."""
        self._parallel.clear()


@dataclass(frozen=True, eq=False)
class CompactSubnetwork:
    """A compact network with the views and the head of its subnetwork, and the context that it computes in."""

    network: nn.Module
    subnetwork: Subnetwork
    precision: Callable[[], AbstractContextManager[None]]

    def view_features(self, pixels: Tensor) -> Tensor:
        """Return the features of every view of the pixels."""
        return self.subnetwork.view_features(pixels, self._features)

    def outputs(self, features: Tensor) -> Outputs:
        """Return features and logits, averaged over the views."""
        return self.subnetwork.outputs(features)

    def _features(self, pixels: Tensor) -> Tensor:
        with self.precision():
            return self.network(as_channels_last(pixels))  # rotated images are no longer laid out channels last


def _num_parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())
