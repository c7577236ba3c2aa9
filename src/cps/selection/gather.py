"""A survey: the evidence for many images, shared out among the processes there are.

Each process passes its stretch of the images through the subnetworks, and all get to know everything; so all must ask
for the same.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cps.data.examples import Examples, ImageBatches
from cps.network.outputs import Evidence, Outputs
from cps.network.shared import SharedNetwork
from cps.runtime.devices import gather_rows

if TYPE_CHECKING:
    from lightning_fabric import Fabric


PIXELS = 2**22  # numbers that a GPU looks at together, so that it need not wait for the next batch


def gather_evidence(network: SharedNetwork, examples: Examples, fabric: "Fabric", *, flipped: bool = False) -> Evidence:
    """Return the evidence of every subnetwork for examples, or for their mirror images."""
    processes, size = fabric.world_size, _images_together(network)
    if processes == 1 or len(examples) < processes:
        return network.evidence(ImageBatches(examples, flipped=flipped, batch_size=size))
    mine = {"part": fabric.global_rank, "parts": processes}
    own = network.evidence(ImageBatches(examples, flipped=flipped, batch_size=size, **mine))

    def together(tasks: Sequence[int]) -> list[Outputs]:
        return [Outputs(*(gather_rows(part, fabric) for part in outputs)) for outputs in own.ask(tasks)]

    return Evidence(together, len(own))


def _images_together(network: SharedNetwork) -> int:
    """Return how many images to look at in one pass: more of them where they are small and a GPU looks."""
    usual = ImageBatches.batch_size
    if network.device.type != "cuda" or network.input_shape is None:
        return usual
    return max(usual, min(4 * usual, PIXELS // math.prod(network.input_shape)))
