"""Admission: which classifiers an engine can train, and which of them can share one."""

from typing import Any

import torch
from torch import Tensor

from cps.network.classifier import Classifier
from cps.network.partition import named_tensors, trainable
from cps.training.settings import Training

CAPTURABLE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def is_capturable(model: Classifier, training: Training) -> bool:
    """Say whether the optimizer treats all numbers alike and reads all it needs from the GPU."""
    parameters = trainable(model).values()
    optimizer = training.optimizer(parameters)
    is_uniform = len(optimizer.param_groups) == 1 and len({parameter.dtype for parameter in parameters}) == 1
    return is_uniform and type(optimizer) in CAPTURABLE


def shape_of(model: Classifier, images: Tensor, training: Training) -> tuple[Any, ...]:
    """Return what must be the same for two fits to share an engine."""
    tensors = [(name, value.shape, value.requires_grad) for name, value in named_tensors(model).items()]
    how = training.optimizer, training.batch_size, training.loss
    return id(model.backbone), tensors, images.shape[1:], images.dtype, how
