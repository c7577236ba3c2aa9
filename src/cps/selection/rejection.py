"""Reject unknown images: those that resemble nothing the selected subnetwork was trained on.

The score is the rank of the image among those of the task's own images, by its maximum logit. If the selector has a
shared space, the relative distance in it is added; each is divided by its spread over the task's own images. The head
of a frozen subnetwork is a closed form, too, so there the distance replaces the logit.
"""

from collections.abc import Mapping
from numbers import Real

import torch
from torch import Tensor

from cps.network.outputs import Evidence
from cps.network.shared import SharedNetwork
from cps.network.subnetwork import Statistics
from cps.selection.base import OpenSetSelector, Selector
from cps.storage.container import FileError

REJECTION_KEY = "familiarity"  # the key of its statistics in a subnetwork and in model files
WEIGHTS, QUANTILES = "rejection weights", "rejection quantiles"  # keys in the statistics of an `OpenSetSelector`
STEPS = 1000  # resolution of the quantiles
LEAST_SPREAD = 1e-3  # of logits or distances; with less, nearly all are the same
DISTANCE_SHAPES = {WEIGHTS: (2,), QUANTILES: (STEPS + 1,)}
FEW_HELD_OUT = (
    "the rejection threshold of some tasks comes from training images, so the share of known images that are rejected "
    "may differ from `reject`; hold out at least 100 images of each task for an accurate threshold"
)


def rejection_statistics(logits: Tensor, *, held_out: bool) -> Statistics:
    """Return the quantiles of the maximum logit of a task's own images, lowered by one standard error.

    `held_out` tells whether those images were held out of training.
    """
    quantiles = _low_quantiles(logits.amax(dim=1).float())
    # "are_new" is fixed by model files: 1 if the images were held out of training.
    return {"quantiles": quantiles, "are_new": quantiles.new_tensor([held_out])}


def distance_statistics(logits: Tensor, distances: Tensor, *, is_frozen: bool) -> Statistics:
    """Return the weights of the maximum logit and of the relative distance, and the quantiles of their weighted sum.

    Distances that are not finite do not count. Return nothing if all distances are the same.
    """
    is_finite = distances.isfinite()
    distances, largest = distances[is_finite].float(), logits.amax(dim=1).float()[is_finite]
    if not len(distances) or _spread(distances) < LEAST_SPREAD:
        return {}
    of_logit = 0.0 if is_frozen else 1 / max(_spread(largest), LEAST_SPREAD)
    weights = distances.new_tensor([of_logit, 1 / _spread(distances)])
    return {WEIGHTS: weights, QUANTILES: _low_quantiles(weights[0] * largest + weights[1] * distances)}


def _spread(values: Tensor) -> float:
    """Return the standard deviation of a normal distribution with the same central 68% as the values.

    Distances of a few images without themselves can be far too low, and would dominate a standard deviation.
    """
    low, high = torch.quantile(values, values.new_tensor([0.16, 0.84])).tolist()
    return (high - low) / 2


def _low_quantiles(values: Tensor) -> Tensor:
    """Return the quantiles of values (N,), lowered by one standard error."""
    levels = torch.linspace(0, 1, STEPS + 1, dtype=values.dtype, device=values.device)
    return torch.quantile(values, levels) - values.std(correction=0) / len(values) ** 0.5


def check_rejection_statistics(network: SharedNetwork, path: object) -> None:
    """Raise `FileError` if the rejection statistics read from a file have the wrong shape."""
    for task, subnetwork in enumerate(network.subnetworks):
        shapes = {name: value.shape for name, value in subnetwork.statistics.get(REJECTION_KEY, {}).items()}
        of_distances = [
            {name: kept[name].shape for name in DISTANCE_SHAPES if name in kept}
            for kept in subnetwork.statistics.values()
        ]
        if shapes != {"are_new": (1,), "quantiles": (STEPS + 1,)} or any(
            found not in ({}, DISTANCE_SHAPES) for found in of_distances
        ):
            raise FileError(f"'{path}' has damaged rejection statistics of task {task}")


def check_reject(reject: float) -> None:
    """Raise `ValueError` unless `reject` is a share of known images in [0, 1)."""
    if not isinstance(reject, Real) or not 0 <= reject < 1:
        raise ValueError(f"reject must be a share of known images in [0, 1), got {reject!r}")


def is_known(network: SharedNetwork, evidence: Evidence, tasks: Tensor, selector: Selector, reject: float) -> Tensor:
    """Return for each image whether its selected task knows it; a share `reject` of the task's own images is not."""
    if any(_is_from_training(each.statistics, selector) for each in network.subnetworks):
        network.warn_once(FEW_HELD_OUT)
    return rejection_score(network, evidence, tasks, selector) >= round(reject * STEPS)


def _is_from_training(statistics: Mapping[str, Statistics], selector: Selector) -> bool:
    """Return True if logits of training images, which are higher than those of new images, set the threshold."""
    if float(statistics[REJECTION_KEY]["are_new"]):
        return False
    kept = statistics.get(selector.name, {})
    return not (isinstance(selector, OpenSetSelector) and WEIGHTS in kept and float(kept[WEIGHTS][0]) == 0)


def rejection_score(network: SharedNetwork, evidence: Evidence, tasks: Tensor, selector: Selector) -> Tensor:
    """Return the per-mille rank of each image among its selected task's own images.

    Below all of them the score is negative, and falls with the distance to the lowest. `selector` has selected the
    tasks; tasks that were learned without distances, and selectors without a shared space, leave the logit alone.
    """
    tasks = tasks.cpu()
    score = torch.full((len(tasks),), float(STEPS))
    statistics = network.statistics(selector.name)[: len(evidence)]
    selected = tasks.unique().tolist()
    distances = None
    if isinstance(selector, OpenSetSelector) and any(WEIGHTS in statistics[task] for task in selected):
        distances = selector.relative_distances(evidence, statistics)
    for task in selected:
        kept, images = statistics[task], (tasks == task).nonzero()[:, 0]
        if distances is None or WEIGHTS not in kept:
            kept = {WEIGHTS: torch.tensor([1.0, 0.0]), QUANTILES: _logit_quantiles(network, task)}
        of_logit, of_distance = kept[WEIGHTS].tolist()
        values = torch.zeros(len(images))
        if of_logit:
            values += of_logit * evidence.some(task, images).logits.amax(dim=1).cpu()
        if of_distance and distances is not None:
            values += of_distance * distances[images.to(distances.device)].cpu()
        score[images] = _rank(values, kept[QUANTILES].cpu())
    return score


def _logit_quantiles(network: SharedNetwork, task: int) -> Tensor:
    return network.subnetworks[task].statistics[REJECTION_KEY]["quantiles"]


def _rank(values: Tensor, quantiles: Tensor) -> Tensor:
    """Return the index of the highest quantile that each value reaches; below all of them, a negative share."""
    lowest, highest = quantiles[0], quantiles[-1]
    rank = torch.searchsorted(quantiles, values, right=True) - 1.0
    return rank.where(values >= lowest, (values - lowest) / (highest - lowest).clamp(min=1e-6))
