"""Loading: a learner from its model file."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from cps.backbones import Builtin
from cps.evidence import Evidence, Outputs
from cps.learner import SETTINGS, Learner
from cps.modelfile import fill, read_model
from cps.plain import unknown_in
from cps.selection import Selector, select
from cps.storage import FileError


def load(path: str | Path, backbone: nn.Module | None = None, **settings: Any) -> Learner:
    """Return the learner in a model file, ready to predict and to learn more.

    `backbone` is a module of the architecture it was learned with, whose values do not matter; a builtin one need not
    be given. Settings are those of the file unless given; one that a file cannot hold, such as a pruner of your own,
    must be given.
    """
    header, tensors = read_model(path)
    builtin = header["settings"].get("backbone")
    if backbone is None and not isinstance(builtin, Builtin):
        raise ValueError(f"'{path}' was learned with a backbone of your own; pass one of that kind to load it")
    found = {name: header["settings"].get(name) for name in SETTINGS if name not in settings}
    for name, value in found.items():
        lost = unknown_in(value)
        if lost:
            raise ValueError(f"'{path}' was learned with {name} {lost[0]}; pass {name}=... to load it")
    try:
        learner = Learner(builtin if backbone is None else backbone, **found, **settings)
    except TypeError as error:
        raise FileError(f"'{path}' has damaged settings: {error}") from error
    learner.network.to(torch.device("cpu"))
    fill(learner.network, path, header, tensors)
    learner.network.to(learner.fabric.device)
    for selector in learner.selectors:
        if all(selector.name in subnetwork.statistics for subnetwork in learner.network.subnetworks):
            _check_statistics(learner, selector, path)
    return learner


def _check_statistics(learner: Learner, selector: Selector, path: str | Path) -> None:
    """Let a selector score two blank images: numbers of a wrong form are found now, not when it matters."""

    def blank(task: int) -> Outputs:
        weight, bias = learner.network.subnetworks[task].head.values()
        return Outputs(weight.new_zeros(2, weight.shape[1]), bias.expand(2, -1))

    evidence = Evidence(lambda tasks: [blank(task) for task in tasks], len(learner.network.subnetworks))
    groups = torch.arange(2, device=learner.network.device)
    try:
        if len(evidence):
            select(selector, evidence, learner.network.statistics(selector.name), groups)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise FileError(f"'{path}' has damaged statistics of {selector.name}: {error}") from error
