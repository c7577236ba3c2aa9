"""The training step at the speed of a GPU. The rest of the library sees one function: `faster_steps`."""

import gc
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cps.data.examples import TensorExamples
from cps.network.classifier import Classifier
from cps.network.partition import named_tensors, trainable
from cps.runtime.devices import deterministic_cudnn, precision_of
from cps.runtime.seeding import seeded
from cps.runtime.text import first_line
from cps.training.cuda.captured_step import CapturedStep
from cps.training.settings import Training
from cps.training.steps import Fit, StepCache, TrainingSteps

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["faster_steps"]

OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
PRECISIONS = {"bf16-mixed": True, "32-true": False}  # and whether it is bf16
LONG_TRAINING = 1500  # steps from which torch.compile is worth its time


def faster_steps(fit: Fit, fabric: "Fabric", cache: StepCache) -> tuple[TrainingSteps | None, list[str]]:
    """Return faster steps for a fit on a GPU, or None; and warnings that say what is missing and why.

    `cache` has the steps of the last fit. They are reused if they can take this one, and replaced otherwise.
    """
    if not isinstance(fit.model, Classifier):
        return None, ["the training step is not captured as a CUDA graph: an objective other than a classifier's loss"]
    reasons = _find_obstacles(fit, fabric)
    if reasons:
        return None, [f"the training step is not captured as a CUDA graph: {', '.join(reasons)}"]
    key, warnings = _cache_key(fit), []
    if cache.key != key:
        cache.clear()
        gc.collect()  # releases the memory of the last steps before the next ones need it
        steps, warnings = _build(fit, fabric)
        cache.key, cache.steps = key, steps
    return cache.steps, warnings


def _find_obstacles(fit: Fit, fabric: "Fabric") -> list[str]:
    """Return the reasons why a fit cannot be captured."""
    precision = precision_of(fabric)
    reasons = {
        "several processes": fabric.world_size > 1,
        f"precision {precision}": precision not in PRECISIONS,
        "images that are read from a data set": not isinstance(fit.examples, TensorExamples),
        "batch norm layers with fixed statistics": _has_fixed_norms(fit.model),
        "an optimizer other than SGD, Adam and AdamW with one group": not _is_capturable(fit.model, fit.training),
    }
    return [reason for reason, applies in reasons.items() if applies]


def _has_fixed_norms(model: nn.Module) -> bool:
    """Return True if batch norm layers keep their statistics in training, as those above a trunk do."""
    model.train()
    return any(isinstance(module, nn.BatchNorm2d) and not module.training for module in model.modules())


def _is_capturable(model: nn.Module, training: Training) -> bool:
    """Return True if the optimizer treats all numbers alike and can read its state from GPU memory."""
    parameters = trainable(model).values()
    optimizer = training.optimizer(parameters)
    is_uniform = len(optimizer.param_groups) == 1 and len({parameter.dtype for parameter in parameters}) == 1
    return is_uniform and type(optimizer) in OPTIMIZERS


def _cache_key(fit: Fit) -> tuple[Any, ...]:
    """Return what must be equal for two fits to share one captured step."""
    assert isinstance(fit.examples, TensorExamples)
    assert isinstance(fit.model, Classifier)
    images, training = fit.examples.images, fit.training
    tensors = [(name, value.shape, value.requires_grad) for name, value in named_tensors(fit.model).items()]
    settings = training.optimizer, training.batch_size, training.loss, fit.transform
    return id(fit.model.backbone), tensors, images.shape[1:], images.dtype, settings, _is_long(fit), _scored(fit)


def _is_long(fit: Fit) -> bool:
    return fit.total_epochs * len(fit.examples) >= LONG_TRAINING * fit.training.batch_size


def _scored(fit: Fit) -> frozenset[str]:
    """Return the names of the weights that have mask scores."""
    return frozenset(name for name, protected in fit.guard.items() if protected.scores is not None)


def _build(fit: Fit, fabric: "Fabric") -> tuple[CapturedStep | None, list[str]]:
    """Return a new captured step, without custom kernels if they fail, or None if that fails too; and warnings."""
    indices = torch.arange(fit.training.batch_size) % len(fit.examples)
    images, _ = next(fit.examples.batches([indices]))
    images, warnings = images.to(fabric.device), []
    for has_custom_kernels, missing in ((True, "custom kernels"), (False, "a CUDA graph")):
        try:
            # `seeded` holds a lock: while kernels are compiled in parallel, no other thread can launch one.
            with deterministic_cudnn(), seeded(fabric.device, 0):
                return _captured_step(fit, images, fabric, has_custom_kernels), warnings
        except Exception as error:  # there may be no C compiler for Triton, or too little memory
            warnings.append(f"training continues without {missing}: {first_line(error)}")
    return None, warnings


def _captured_step(fit: Fit, images: Tensor, fabric: "Fabric", has_custom_kernels: bool) -> CapturedStep:
    assert isinstance(fit.model, Classifier)
    options: dict[str, Any] = {"is_bf16": PRECISIONS[precision_of(fabric)], "has_custom_kernels": has_custom_kernels}
    options |= {"can_compile": _is_long(fit), "scored": _scored(fit)}
    return CapturedStep(fit.model, images, fit.training, fit.transform, **options)
