"""Loading: a learner from its model file."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cps.config import SETTINGS, check_forms
from cps.data.rotations import check_rotations
from cps.learner import Learner
from cps.network.backbones import Builtin
from cps.network.model_file import fill, read_model
from cps.network.outputs import Evidence, Outputs
from cps.network.shared import SharedNetwork
from cps.selection.base import Selector, select
from cps.selection.rejection import check_rejection_statistics
from cps.selection.statistics import check_selectors, missing_statistics
from cps.storage.container import FileError
from cps.storage.settings_codec import unknown_in


class BackboneMissing(ValueError):
    """A model file does not name its backbone."""


Load = Callable[..., Learner]  # a path, and settings such as `fabric`, -> the learner


def load(path: str | Path, backbone: nn.Module | None = None, **settings: Any) -> Learner:
    """Return the learner in a model file, ready to predict and to learn more.

    `backbone` is a module of the architecture it was learned with, whose values do not matter; a builtin one need not
    be given. Settings are those of the file unless given; one that a file cannot hold, such as a pruner of your own,
    must be given.
    """
    header, tensors = read_model(path)
    builtin = header["settings"].get("backbone")
    if backbone is None and not isinstance(builtin, Builtin):
        raise BackboneMissing(f"'{path}' was learned with a backbone of your own; pass one of that kind to load it")
    found = {name: header["settings"].get(name) for name in SETTINGS if name not in settings}
    for name, value in found.items():
        lost = unknown_in(value)
        if lost:
            raise ValueError(f"'{path}' was learned with {name} {lost[0]}; pass {name}=... to load it")
    _check_settings(found, path)
    learner = Learner(builtin if backbone is None else backbone, **found, **settings)
    learner.network.to(torch.device("cpu"))
    fill(learner.network, path, header, tensors)
    _check_shapes(learner.network, path)
    learner.network.to(learner.fabric.device)
    check_rejection_statistics(learner.network, path)
    for selector in learner.selectors:
        if not any(missing_statistics([selector], learner.network)):
            _check_statistics(learner, selector, path)
    return learner


def _check_settings(found: Mapping[str, Any], path: str | Path) -> None:
    """Refuse settings of another kind than the learner's, which would fail much later, or not at all."""
    try:
        check_forms(**found)
        if "selectors" in found:
            check_selectors(found["selectors"])
    except (TypeError, ValueError) as error:
        raise FileError(f"'{path}' has damaged settings: {error}") from None


def _check_shapes(network: SharedNetwork, path: str | Path) -> None:
    """Show the backbone a blank image of the file's shape: one that it cannot look at is found now."""
    if not network.subnetworks:
        return
    shape = network.input_shape or ()
    try:
        for subnetwork in network.subnetworks:
            check_rotations(shape, subnetwork.num_rotations, subnetwork.flips)
        features = _features_of_a_blank(network, shape)
    except Exception as error:  # whatever a module's forward does
        raise FileError(f"'{path}' does not fit this backbone, which cannot look at images {shape}: {error}") from error
    widths = {subnetwork.head["weight"].shape[1] for subnetwork in network.subnetworks}
    if features.ndim != 2 or widths != {features.shape[1]}:
        raise FileError(f"'{path}' does not fit this backbone: its heads read {sorted(widths)} features")


@torch.no_grad()
def _features_of_a_blank(network: SharedNetwork, shape: tuple[int, ...]) -> Tensor:
    """Return features on the meta device, where shapes cost nothing, or real ones where a module cannot do that."""
    twin = copy.deepcopy(network.backbone).eval()
    try:
        return twin.to("meta")(network.prepare(torch.zeros(1, *shape, device="meta")))
    except Exception:
        return network.whole_outputs([torch.zeros(1, *shape)], 0).features


def _check_statistics(learner: Learner, selector: Selector, path: str | Path) -> None:
    """Let a selector score two blank images: numbers of a wrong form are found now, not when it matters."""

    def blank(task: int) -> Outputs:
        subnetwork = learner.network.subnetworks[task]
        features = subnetwork.head["weight"].new_zeros(2, subnetwork.head["weight"].shape[1])
        return subnetwork.say(features.expand(len(subnetwork.views), -1, -1))

    evidence = Evidence(lambda tasks: [blank(task) for task in tasks], len(learner.network.subnetworks))
    groups = torch.arange(2, device=learner.network.device)
    try:
        if len(evidence):
            select(selector, evidence, learner.network.statistics(selector.name), groups)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise FileError(f"'{path}' has damaged statistics of {selector.name}: {error}") from error
