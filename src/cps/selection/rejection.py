"""Reject unknown images: those that resemble nothing the selected subnetwork was trained on.

The score is the rank of the image's maximum logit among those of the task's own images.
"""

from numbers import Real

import torch
from torch import Tensor

from cps.network.outputs import Evidence
from cps.network.shared import SharedNetwork
from cps.storage.container import FileError

REJECTION_KEY = "familiarity"  # the key of its statistics in a subnetwork and in model files
STEPS = 1000  # resolution of the quantiles
FEW_HELD_OUT = (
    "the rejection threshold of some tasks comes from training images, so the share of known images that are rejected "
    "may differ from `reject`; hold out at least 100 images of each task for an accurate threshold"
)


def rejection_statistics(logits: Tensor, *, held_out: bool) -> dict[str, Tensor]:
    """Return the quantiles of the maximum logit of a task's own images, lowered by one standard error.

    `held_out` tells whether those images were held out of training.
    """
    largest = logits.amax(dim=1).float()
    levels = torch.linspace(0, 1, STEPS + 1, dtype=largest.dtype, device=logits.device)
    standard_error = largest.std(correction=0) / len(largest) ** 0.5
    # "are_new" is fixed by model files: 1 if the images were held out of training.
    return {"quantiles": torch.quantile(largest, levels) - standard_error, "are_new": levels.new_tensor([held_out])}


def check_rejection_statistics(network: SharedNetwork, path: object) -> None:
    """Raise `FileError` if the rejection statistics read from a file have the wrong shape."""
    for task, subnetwork in enumerate(network.subnetworks):
        shapes = {name: value.shape for name, value in subnetwork.statistics.get(REJECTION_KEY, {}).items()}
        if shapes != {"are_new": (1,), "quantiles": (STEPS + 1,)}:
            raise FileError(f"'{path}' has damaged rejection statistics of task {task}")


def check_reject(reject: float) -> None:
    """Raise `ValueError` unless `reject` is a share of known images in [0, 1)."""
    if not isinstance(reject, Real) or not 0 <= reject < 1:
        raise ValueError(f"reject must be a share of known images in [0, 1), got {reject!r}")


def is_known(network: SharedNetwork, evidence: Evidence, tasks: Tensor, reject: float) -> Tensor:
    """Return for each image whether its selected task knows it; a share `reject` of the task's own images is not."""
    check_reject(reject)
    if reject == 0:
        return torch.ones(len(tasks), dtype=torch.bool, device=tasks.device)
    if any(not float(each.statistics[REJECTION_KEY]["are_new"]) for each in network.subnetworks):
        network.warn_once(FEW_HELD_OUT)
    return rejection_score(network, evidence, tasks) >= round(reject * STEPS)


def rejection_score(network: SharedNetwork, evidence: Evidence, tasks: Tensor) -> Tensor:
    """Return the per-mille rank of each image's maximum logit among its selected task's own images.

    Below all of them the score is negative, and falls with the distance to the lowest.
    """
    tasks = tasks.cpu()
    score = torch.full((len(tasks),), float(STEPS))
    for task in tasks.unique().tolist():
        quantiles = network.subnetworks[task].statistics[REJECTION_KEY]["quantiles"].cpu()
        images = (tasks == task).nonzero()[:, 0]
        lowest, highest = quantiles[0], quantiles[-1]
        largest = evidence.some(task, images).logits.amax(dim=1).cpu()
        rank = torch.searchsorted(quantiles, largest, right=True) - 1.0
        score[images] = rank.where(largest >= lowest, (largest - lowest) / (highest - lowest).clamp(min=1e-6))
    return score
