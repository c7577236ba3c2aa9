"""Predictions: what the selected subnetworks call the images."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cps.data.examples import ClassName
from cps.network.outputs import Evidence
from cps.network.shared import SharedNetwork
from cps.selection.rejection import is_known


@dataclass(frozen=True, eq=False)
class Prediction:
    """The class of each image, the task it was found in, and how sure both are.

    `share` is the task's softmax share of the scores of all tasks, larger for a group that agrees than for one image,
    and 1 where the task was told; `confidence` is the class's share in that task. The class is None where the image
    looks like none that the task has learned, if that was asked for.
    """

    classes: list[ClassName | None]
    tasks: Tensor
    share: Tensor
    confidence: Tensor


def classify(
    network: SharedNetwork, evidence: Evidence, tasks: Tensor, share: Tensor | None = None, *, reject: float = 0.0
) -> Prediction:
    """Let the selected subnetwork of each image name its class, unless the image is not familiar to it."""
    tasks = tasks.cpu()
    classes: list[ClassName | None] = [None] * len(tasks)
    known = is_known(network, evidence, tasks, reject).tolist()
    confidence = torch.zeros(len(tasks), dtype=torch.float32)
    for task in tasks.unique().tolist():
        mine = (tasks == task).nonzero()[:, 0]
        confidence[mine], output = evidence[task].logits[mine].cpu().softmax(dim=1).max(dim=1)
        names = network.subnetworks[task].names(output)
        for index, name in zip(mine.tolist(), names, strict=True):
            classes[index] = name if known[index] else None
    share = torch.ones_like(confidence) if share is None else share.float().cpu()
    return Prediction(classes, tasks, share, confidence)
