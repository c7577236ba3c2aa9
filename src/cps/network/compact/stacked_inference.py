"""Run many small compact subnetworks, each on a few other images, as one network with stacked weights.

Calling a network this small takes longer than its arithmetic. The compact networks of one backbone are the same graph
with different numbers of channels. So their weights are padded with zeros to the same numbers of channels and stacked,
and every layer becomes one operation for all of them.
"""

import copy
import logging
import math
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.utils.rnn import pad_sequence

from cps.network.compact.parallel_inference import Branch
from cps.network.outputs import Outputs, are_close
from cps.network.partition import named_tensors
from cps.network.subnetwork import Subnetwork
from cps.runtime.text import first_line

FEWEST_NETWORKS = 8  # with fewer, stacking takes longer than it saves
MOST_PARAMETERS = 2**16  # of a network; with more, copying its weights takes longer than calling it
MOST_IMAGES = 4  # of a network, every view counted; with more, its arithmetic takes longer than the call
AT_ONCE = 32  # networks in one stack
KEPT_NUMBERS = 2**26  # in padded weights: 256 MiB
PARTS = ("body ", "head ")  # prefixes of the names of a branch's tensors

log = logging.getLogger(__name__)


class SmallBranch(Branch, Protocol):
    """A compact network and the subnetwork whose head it ends with."""

    @property
    def network(self) -> nn.Module:
        """The compact network."""
        ...

    @property
    def subnetwork(self) -> Subnetwork:
        """The subnetwork."""
        ...


class StackedInference:
    """Runs branches of one backbone, which it knows by the index of their task.

    The padded weights of the branches that ran last are kept. `sample()` returns some pixels on which the stacked
    branches are compared with each alone.
    """

    def __init__(self, sample: Callable[[], Tensor]):
        self._sample = sample
        self._template: SmallBranch | None = None  # whose graph and views all have
        self._shapes: dict[str, tuple[int, ...]] = {}  # the largest of each tensor
        self._padded: dict[int, dict[str, Tensor]] = {}  # by task, the most recently used last
        self._is_possible = True

    @torch.no_grad()
    def outputs(self, branches: Mapping[int, SmallBranch], pixels: Mapping[int, Tensor]) -> dict[int, Outputs]:
        """Return the outputs of the branches for which stacking is faster, for the pixels (n, ...) of each."""
        small = {task: branch for task, branch in branches.items() if self._is_small(task, branch, pixels[task])}
        if not self._is_possible or len(small) < FEWEST_NETWORKS:
            return {}
        try:
            if any(task not in self._padded for task in small):
                self._widen(small)
            return self._run(small, pixels)
        except Exception as error:  # an operation that cannot be stacked may raise anything
            log.info("small networks run one by one (%s: %s)", type(error).__name__, first_line(error))
            self._is_possible = False
            return {}

    def _is_small(self, task: int, branch: SmallBranch, pixels: Tensor) -> bool:
        """Return True if a branch runs on few images and is like the other ones, and small."""
        if pixels.is_cuda or len(pixels) * len(branch.subnetwork.views) > MOST_IMAGES:
            return False
        return task in self._padded or (
            (self._template is None or _kind(branch) == _kind(self._template))
            and sum(parameter.numel() for parameter in branch.network.parameters()) <= MOST_PARAMETERS
        )

    def _run(self, branches: Mapping[int, SmallBranch], pixels: Mapping[int, Tensor]) -> dict[int, Outputs]:
        found: dict[int, Outputs] = {}
        tasks = sorted(branches, key=lambda task: len(pixels[task]))
        for some in (tasks[start : start + AT_ONCE] for start in range(0, len(tasks), AT_ONCE)):
            padded = [self._pad(task, branches[task]) for task in some]
            stacked = {name: torch.stack([each[name] for each in padded]) for name in self._shapes}
            images = pad_sequence([pixels[task] for task in some], batch_first=True)  # (networks, most images, ...)
            together = vmap(self._call)(stacked, images)
            for task, features, logits in zip(some, *together, strict=True):
                own, classes = len(pixels[task]), len(branches[task].subnetwork.classes)
                found[task] = Outputs(features[:own], logits[:own, :classes])
        return found

    def _call(self, tensors: Mapping[str, Tensor], pixels: Tensor) -> Outputs:
        """Return the outputs of a branch that has these tensors, named as by `_tensors`."""
        assert self._template is not None
        graph, subnetwork = self._template.network, self._template.subnetwork
        body, head = ({name[len(p) :]: tensors[name] for name in tensors if name.startswith(p)} for p in PARTS)
        features = subnetwork.view_features(pixels, lambda views: functional_call(graph, body, (views,)))
        return subnetwork.outputs(features, head)

    def _pad(self, task: int, branch: SmallBranch) -> dict[str, Tensor]:
        """Return the tensors of a branch, padded with zeros to the largest shapes."""
        padded = self._padded.pop(task, None)
        if padded is None:
            tensors = _tensors(branch)
            padded = {name: value.new_zeros(self._shapes[name]) for name, value in tensors.items()}
            for name, value in tensors.items():
                padded[name][tuple(map(slice, value.shape))] = value
            while self._padded and (len(self._padded) + 1) * sum(map(math.prod, self._shapes.values())) > KEPT_NUMBERS:
                del self._padded[next(iter(self._padded))]
        self._padded[task] = padded
        return padded

    def _widen(self, branches: Mapping[int, SmallBranch]) -> None:
        """Make the largest shapes large enough for these branches; raise `ValueError` if stacking changes outputs."""
        if self._template is None:
            self._template = copy.deepcopy(next(iter(branches.values())))
        shapes = dict(self._shapes)
        for branch in branches.values():
            for name, value in _tensors(branch).items():
                shapes[name] = tuple(map(max, shapes.get(name, value.shape), value.shape))
        if shapes == self._shapes:
            return
        self._shapes = shapes
        self._padded.clear()
        for name, layer in self._template.network.named_modules():
            if isinstance(layer, nn.Conv2d) and layer.groups > 1:  # depthwise: one group for each channel
                layer.groups = shapes[f"{PARTS[0]}{name}.weight"][0]
        pixels = self._sample()
        for task, found in self._run(branches, dict.fromkeys(branches, pixels)).items():
            expected = branches[task].outputs(branches[task].view_features(pixels))
            if not all(are_close(*both) for both in zip(found, expected, strict=True)):
                raise ValueError("stacked, they compute other outputs")


def _kind(branch: SmallBranch) -> tuple[object, ...]:
    """Return what branches must have in common to be stacked: all but the numbers of channels and classes."""
    subnetwork = branch.subnetwork
    return getattr(branch.network, "code", None), subnetwork.views, bool(subnetwork.pretrained_head)


def _tensors(branch: SmallBranch) -> dict[str, Tensor]:
    """Return all tensors of a branch by name."""
    parts = zip(PARTS, (named_tensors(branch.network), branch.subnetwork.head), strict=True)
    return {prefix + name: value for prefix, tensors in parts for name, value in tensors.items()}
