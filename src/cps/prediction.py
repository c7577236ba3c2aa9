"""Predictions: what the selected subnetworks call the images."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cps.data import ClassName
from cps.evidence import Evidence
from cps.network import SharedNetwork


@dataclass(frozen=True)
class Prediction:
    """The class of each image, the task it was found in, and the class's softmax share in that task."""

    classes: list[ClassName]
    tasks: Tensor
    confidence: Tensor


def classify(network: SharedNetwork, evidence: Evidence, tasks: Tensor) -> Prediction:
    """Let the selected subnetwork of each image name its class."""
    classes: list[ClassName] = [""] * len(tasks)
    confidence = torch.zeros(len(tasks))
    for task in tasks.unique().tolist():
        mine = (tasks == task).nonzero()[:, 0]
        share, output = evidence[task].logits[mine].softmax(dim=1).max(dim=1)
        confidence[mine.cpu()] = share.cpu()
        names = network.subnetworks[task].names(output)
        for index, name in zip(mine.tolist(), names, strict=True):
            classes[index] = name
    return Prediction(classes, tasks.cpu(), confidence)
