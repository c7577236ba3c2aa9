"""What can be done with classes that are known: add images of them, rename them, and forget one of a task.

Statistics that are sums over images grow or shrink exactly. A sealed subnetwork learns nothing new: it keeps its
weights and the outputs of the classes that stay.
"""

import logging
from collections.abc import Sequence
from difflib import get_close_matches

import torch
from torch import Tensor

from cps.data.examples import ClassName
from cps.network.outputs import Evidence
from cps.network.shared import SharedNetwork
from cps.selection.base import GrowingSelector, Selector, ShrinkingSelector, Statistics
from cps.selection.rejection import REJECTION_KEY

log = logging.getLogger(__name__)


def check_growing(selectors: Sequence[Selector]) -> None:
    """Raise `ValueError` if no selector keeps sums to which images can be added."""
    if not any(isinstance(selector, GrowingSelector) for selector in selectors):
        names = ", ".join(selector.name for selector in selectors)
        raise ValueError(
            f"{names} keep no sums to which images of known classes could be added; use Fusion or SharedSpace, or "
            "learn(task, new_versions=True)"
        )


def add_images(
    network: SharedNetwork,
    classes: Sequence[ClassName],
    evidence: Evidence,
    labels: Tensor,
    selectors: Sequence[Selector],
) -> list[int]:
    """Add images of known classes to the sums of the selectors; return the tasks that these classes belong to.

    `labels` are indices into `classes`. Images of a class with several versions are added to the latest one.
    """
    labels = labels.cpu()
    owners = torch.tensor([network.tasks_of(name)[-1] for name in classes])
    tasks = owners[labels].unique().tolist()
    for task in tasks:
        rows = (owners[labels] == task).nonzero()[:, 0]
        own = network.subnetworks[task].local([classes[index] for index in labels[rows].tolist()]).to(network.device)
        of_task = evidence.of_images(rows)
        for selector in selectors:
            statistics = network.statistics(selector.name)
            if isinstance(selector, GrowingSelector) and statistics[task]:
                grown = _as_kept(selector.add_images(statistics, task, of_task, own), network.device)
                network.set_statistics(task, {**network.subnetworks[task].statistics, selector.name: grown})
    return tasks


def rename_class(network: SharedNetwork, old: ClassName, new: ClassName) -> None:
    """Rename a class in all tasks that have it; raise `ValueError` unless it is known and the new name is not."""
    tasks = known_tasks(network, old)
    check_new_name(network, new)
    with network.transaction():
        for task in tasks:
            network.rename_class(task, old, new)


def check_new_name(network: SharedNetwork, name: ClassName) -> None:
    """Raise an error unless a name can be given to a class: it must be text or an integer, and no other class's."""
    if not isinstance(name, str | int) or isinstance(name, bool):
        raise TypeError(f"the name of a class must be a string or an int, got {name!r}")
    if isinstance(name, str) and not name.strip():
        raise ValueError("the name of a class must not be empty")
    if network.tasks_of(name):
        raise ValueError(f"the class {name!r} exists already; two classes cannot become one by renaming")


def forget_class(network: SharedNetwork, task: int, name: ClassName, selectors: Sequence[Selector]) -> None:
    """Cut the outputs of a class out of a task with several classes, and take it out of the selectors' statistics.

    Statistics of selectors that cannot do so are dropped for this task; the first selector, which predicts, must.
    """
    subnetwork = network.subnetworks[task]
    index = subnetwork.classes.index(name)
    by_name = {selector.name: selector for selector in selectors}
    statistics: dict[str, Statistics] = {}
    for key, kept in subnetwork.statistics.items():
        selector = by_name.get(key)
        if key == REJECTION_KEY or not kept:
            statistics[key] = kept
        elif isinstance(selector, ShrinkingSelector):
            statistics[key] = _as_kept(selector.without_class(kept, index), network.device)
        elif selector is selectors[0]:
            raise ValueError(f"{key} cannot take a class out of its statistics; forget the whole task instead")
        else:
            log.warning("%s cannot take a class out of its statistics of task %d; they are dropped", key, task)
    with network.transaction():
        network.cut_class(task, index, statistics)


def _as_kept(statistics: Statistics, device: torch.device) -> Statistics:
    """Return statistics as float32 tensors, which a model file can hold."""
    return {key: value.detach().float().to(device) for key, value in statistics.items()}


def known_tasks(network: SharedNetwork, name: ClassName) -> list[int]:
    """Return the tasks that have a class; raise `ValueError` if there is none."""
    tasks = network.tasks_of(name)
    if not tasks:
        known = {str(known): known for subnetwork in network.subnetworks for known in subnetwork.classes}
        nearest = [repr(known[match]) for match in get_close_matches(str(name), list(known), n=3)]
        hint = f"; did you mean {' or '.join(nearest)}?" if nearest else ""
        raise ValueError(f"no task has learned the class {name!r}{hint}")
    return tasks
