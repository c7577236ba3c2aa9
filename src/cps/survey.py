"""A survey: the evidence for many images, shared out among the processes there are.

Each process passes its stretch of the images through the subnetworks, and all get to know everything; so all must ask
for the same.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cps.data import Examples, ImageBatches
from cps.devices import gathered
from cps.evidence import Evidence, Outputs
from cps.network import SharedNetwork

if TYPE_CHECKING:
    from lightning_fabric import Fabric


def survey(network: SharedNetwork, examples: Examples, fabric: "Fabric", *, mirrored: bool = False) -> Evidence:
    """Return the evidence of every subnetwork for examples, or for their mirror images."""
    processes = fabric.world_size
    if processes == 1 or len(examples) < processes:
        return network.evidence(ImageBatches(examples, mirrored=mirrored))
    own = network.evidence(ImageBatches(examples, mirrored=mirrored, part=fabric.global_rank, parts=processes))

    def together(tasks: Sequence[int]) -> list[Outputs]:
        return [Outputs(*(gathered(part, fabric) for part in outputs)) for outputs in own.ask(tasks)]

    return Evidence(together, len(own))
