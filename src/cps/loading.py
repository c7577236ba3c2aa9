"""Load a learner from its model file."""

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cps.config import SETTINGS, LearnerConfig
from cps.data.rotations import check_rotations
from cps.learner import Learner
from cps.network.architectures import Architecture
from cps.network.model_file import fill_network, read_model
from cps.network.outputs import Evidence, Outputs
from cps.network.shared import SharedNetwork
from cps.selection.base import Selector
from cps.selection.predict import class_scorer, select
from cps.selection.rejection import check_rejection_statistics, rejection_score
from cps.selection.statistics import missing_statistics
from cps.storage.container import FileError
from cps.storage.settings_codec import unknown_in

MAX_BLANK_SIDE = 256  # pixels; a file may claim larger images, for which there may be no memory
MAX_BLANK_VALUES = 3 * MAX_BLANK_SIDE**2


class BackboneMissing(ValueError):
    """Raised when a model file does not name its backbone and none is given."""


Load = Callable[..., Learner]  # (path, **settings) -> Learner


def load(path: str | Path, backbone: nn.Module | None = None, **settings: Any) -> Learner:
    """Return the learner in a model file, ready to predict and to learn more.

    `backbone` is a module of the architecture that the model was learned with; its values do not matter. A builtin
    backbone need not be given. `settings` are those of `Learner` and replace the file's. A setting that a file cannot
    hold, such as your own pruner, must be given.
    """
    header, tensors = read_model(path)
    architecture = header["settings"].get("backbone")
    if backbone is None and not isinstance(architecture, Architecture):
        raise BackboneMissing(f"'{path}' was learned with your own backbone; pass a backbone of the same architecture")
    stored = {name: header["settings"].get(name) for name in SETTINGS if name not in settings}
    for name, value in stored.items():
        lost = unknown_in(value)
        if lost:
            raise ValueError(f"'{path}' was learned with {name} {lost[0]}, which files cannot hold; pass {name}=...")
    try:
        LearnerConfig(**stored)
    except (TypeError, ValueError) as error:
        raise FileError(f"'{path}' has damaged settings: {error}") from None
    learner = Learner(architecture if backbone is None else backbone, **stored, **settings)
    learner.network.to(torch.device("cpu"))
    fill_network(learner.network, path, header, tensors)
    _check_shapes(learner.network, path)
    learner.network.to(learner.fabric.device)
    check_rejection_statistics(learner.network, path)
    for selector in learner.config.selectors:
        if not any(missing_statistics([selector], learner.network)):
            _check_selector_statistics(learner, selector, path)
    return learner


def _check_shapes(network: SharedNetwork, path: str | Path) -> None:
    """Run a blank image of the file's shape, so that a backbone that does not fit is found now."""
    if not network.subnetworks:
        return
    shape = network.input_shape or ()
    try:
        for subnetwork in network.subnetworks:
            check_rotations(shape, subnetwork.num_rotations, subnetwork.flips)
        features = _features_of_blank(network, shape)
    except Exception as error:  # a module's forward may raise anything
        raise FileError(f"'{path}' does not fit this backbone, which cannot process images {shape}: {error}") from error
    widths = {subnetwork.head["weight"].shape[1] for subnetwork in network.subnetworks}
    if features.ndim != 2 or widths != {features.shape[1]}:
        raise FileError(f"'{path}' does not fit this backbone: its heads expect {sorted(widths)} features")


@torch.no_grad()
def _features_of_blank(network: SharedNetwork, shape: tuple[int, ...]) -> Tensor:
    """Return features of a blank image.

    Those of a large image are on the meta device, where shapes cost no memory, but torch takes seconds to import it.
    """
    module = network.with_trunk(copy.deepcopy(network.backbone).eval())
    if math.prod(shape) <= MAX_BLANK_VALUES:
        return module(network.prepare(torch.zeros(1, *shape)))
    try:
        return module.to("meta")(network.prepare(torch.zeros(1, *shape, device="meta")))
    except Exception:
        return network.full_outputs([torch.zeros(1, *shape)], 0).features


def _check_selector_statistics(learner: Learner, selector: Selector, path: str | Path) -> None:
    """Let a selector score two blank images, so that statistics of a wrong form are found now."""

    def blank(task: int) -> Outputs:
        subnetwork = learner.network.subnetworks[task]
        features = subnetwork.head["weight"].new_zeros(2, subnetwork.head["weight"].shape[1])
        return subnetwork.outputs(features.expand(len(subnetwork.views), -1, -1))

    shape = learner.network.input_shape or ()
    blanks = [torch.zeros(2, *shape[:1], *(min(side, MAX_BLANK_SIDE) for side in shape[1:]))]
    outputs = [blank(task) for task in range(len(learner.network.subnetworks))]
    evidence = Evidence.of(outputs, partial(learner.network.features, blanks))
    groups = torch.arange(2, device=learner.network.device)
    try:
        if len(evidence):
            statistics = learner.network.statistics(selector.name)
            selected = select(selector, evidence, statistics, groups)
            rejection_score(learner.network, evidence, selected.tasks, selector)
            score = class_scorer(selector, evidence, statistics)
            for task, subnetwork in enumerate(learner.network.subnetworks):
                classes = score(task).shape[1]
                if classes != len(subnetwork.classes):
                    raise ValueError(f"task {task} has {len(subnetwork.classes)} classes, but statistics of {classes}")
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise FileError(f"'{path}' has damaged statistics of {selector.name}: {error}") from error
