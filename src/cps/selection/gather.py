"""Outputs of all subnetworks for many images, computed by all processes together."""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

from torch import Tensor

from cps.closed_form.spaces import Pretrained, Space
from cps.data.examples import Examples, ImageBatches, known_features
from cps.network.outputs import Evidence, Outputs
from cps.network.shared import CPU_BATCH_VALUES, SharedNetwork
from cps.runtime.devices import gather_rows

if TYPE_CHECKING:
    from lightning_fabric import Fabric

GPU_BATCH_VALUES = 2**22  # input values per batch that keep a GPU busy


def gather_evidence(
    network: SharedNetwork,
    examples: Examples,
    fabric: "Fabric",
    *,
    flipped: bool = False,
    features: Callable[[Space | None], Tensor] | None = None,
) -> Evidence:
    """Return the evidence of every subnetwork for examples, or for their mirror images if `flipped`.

    `features` returns their features in a space, if they are known from an earlier evidence. Each process runs its part
    of the images and all receive all outputs, so all processes must make the same calls.
    """
    if features is None and not flipped:
        features = _known_features(network, examples)
    processes, size = fabric.world_size, _batch_size(network)
    if processes == 1 or len(examples) < processes:
        return network.evidence(ImageBatches(examples, flipped=flipped, batch_size=size), features)
    part = {"part": fabric.global_rank, "parts": processes}
    own = network.evidence(ImageBatches(examples, flipped=flipped, batch_size=size, **part))

    def forward(tasks: Sequence[int]) -> list[Outputs]:
        return [Outputs(*(gather_rows(rows, fabric) for rows in outputs)) for outputs in own.compute(tasks)]

    return Evidence(forward, len(own), features or (lambda space: gather_rows(own.features(space), fabric)))


def _known_features(network: SharedNetwork, examples: Examples) -> Callable[[Space | None], Tensor] | None:
    """Return a function that gives features which the examples' data set knows, and computes others; None without."""
    if known_features(examples, Pretrained()) is None:
        return None

    def features(space: Space | None) -> Tensor:
        known = known_features(examples, space)
        if known is None:
            return network.features(ImageBatches(examples, batch_size=_batch_size(network)), space)
        return known.to(network.device)

    return cache(features)


def _batch_size(network: SharedNetwork) -> int:
    """Return the images per batch: the default, more if they are small and run on a GPU, fewer photos on a CPU."""
    default = ImageBatches.batch_size
    if network.input_shape is None:
        return default
    if network.device.type == "cpu":
        return max(1, min(default, CPU_BATCH_VALUES // math.prod(network.input_shape)))
    if network.device.type != "cuda":
        return default
    return max(default, min(4 * default, GPU_BATCH_VALUES // math.prod(network.input_shape)))
