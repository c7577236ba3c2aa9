"""Observation: what is kept about a task that has just been sealed. Numbers, never images."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cps.data import Examples, all_labels
from cps.devices import agreed
from cps.familiarity import NAME, familiar_outputs
from cps.network import SharedNetwork
from cps.selection import Selector
from cps.survey import survey

if TYPE_CHECKING:
    from lightning_fabric import Fabric


def observe_last(
    network: SharedNetwork,
    examples: Examples,
    held_out: Examples | None,
    selectors: Sequence[Selector],
    fabric: "Fabric",
) -> None:
    """Let every selector keep its numbers about the task learned last, and note how familiar its images look.

    The latter is told from images that were held out of training, where there are any.
    """
    subnetwork = network.subnetworks[-1]
    evidence = survey(network, examples, fabric)
    labels = all_labels(examples).to(network.device)
    for selector in selectors:
        kept = selector.observe(subnetwork, evidence, labels, network.statistics(selector.name)[:-1])
        subnetwork.statistics[selector.name] = agreed(kept, fabric)
    own = evidence[-1] if held_out is None else survey(network, held_out, fabric)[-1]
    subnetwork.statistics[NAME] = agreed(familiar_outputs(own.logits), fabric)
    network.forget_images()
