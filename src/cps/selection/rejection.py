"""Familiarity: whether an image looks like those that the selected subnetwork has learned, or like none of them."""

from numbers import Real

import torch
from torch import Tensor

from cps.network.outputs import Evidence
from cps.network.shared import SharedNetwork
from cps.storage.container import FileError

NAME = "familiarity"  # its place among the statistics of a subnetwork
STEPS = 1000  # in which shares of images are counted
ROUGH = (
    "how familiar images look was measured on training images for some tasks: the share of known images called "
    "unknown may be far from what was asked for; hold a hundred or more out of training for a true one"
)


def rejection_statistics(logits: Tensor, *, are_new: bool) -> dict[str, Tensor]:
    """Return what to keep about a task's own images: which largest output each share of them stays below.

    Of few images that is uncertain, so the figures are a little lower then. `are_new`: they were held out of training.
    """
    largest = logits.amax(dim=1).float()
    shares = torch.linspace(0, 1, STEPS + 1, dtype=largest.dtype, device=logits.device)
    doubt = largest.std(correction=0) / len(largest) ** 0.5
    return {"quantiles": torch.quantile(largest, shares) - doubt, "are_new": shares.new_tensor([are_new])}


def check_rejection_statistics(network: SharedNetwork, path: object) -> None:
    """Refuse a file whose figures have a wrong form."""
    for task, subnetwork in enumerate(network.subnetworks):
        shapes = {name: value.shape for name, value in subnetwork.statistics.get(NAME, {}).items()}
        if shapes != {"are_new": (1,), "quantiles": (STEPS + 1,)}:
            raise FileError(f"'{path}' has damaged statistics of task {task}: how familiar its images look")


def check_reject(reject: float) -> None:
    """Refuse what is no share."""
    if not isinstance(reject, Real) or not 0 <= reject < 1:
        what = "reject is the share of known images that may be taken for unknown"
        raise ValueError(f"{what}, at least 0 and below 1, got {reject!r}")


def is_known(network: SharedNetwork, evidence: Evidence, tasks: Tensor, reject: float) -> Tensor:
    """Say of each image whether its selected subnetwork answers as strongly as it does to its own images.

    A share `reject` of a task's own images is taken for unknown.
    """
    check_reject(reject)
    if reject == 0:
        return torch.ones(len(tasks), dtype=torch.bool, device=tasks.device)
    if any(not float(each.statistics[NAME]["are_new"]) for each in network.subnetworks):
        network.warn_once(ROUGH)
    return rejection_score(network, evidence, tasks) >= round(reject * STEPS)


def rejection_score(network: SharedNetwork, evidence: Evidence, tasks: Tensor) -> Tensor:
    """Return how many in a thousand of its selected task's own images look no more familiar than each image.

    Where none does, the figure is negative, the more so the stranger the image is.
    """
    tasks = tasks.cpu()
    found = torch.full((len(tasks),), float(STEPS))
    for task in tasks.unique().tolist():
        quantiles, mine = network.subnetworks[task].statistics[NAME]["quantiles"].cpu(), tasks == task
        least, most = quantiles[0], quantiles[-1]
        largest = evidence[task].logits[mine].amax(dim=1).cpu()
        rank = torch.searchsorted(quantiles, largest, right=True) - 1.0
        found[mine] = rank.where(largest >= least, (largest - least) / (most - least).clamp(min=1e-6))
    return found
