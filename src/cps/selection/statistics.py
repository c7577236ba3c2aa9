"""The statistics that are kept about each task: those of its selectors, and those of rejection. Never images."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cps.closed_form.calibration import spread_indices
from cps.closed_form.spaces import Space
from cps.data.examples import Examples, read_labels
from cps.network.outputs import Evidence
from cps.network.shared import SharedNetwork
from cps.network.subnetwork import Subnetwork
from cps.runtime.devices import broadcast
from cps.selection.base import (
    HeldOutSelector,
    LinkedSelector,
    OpenSetSelector,
    Selector,
    Statistics,
    is_selector,
)
from cps.selection.gather import gather_evidence
from cps.selection.rejection import REJECTION_KEY, distance_statistics, rejection_statistics

if TYPE_CHECKING:
    from lightning_fabric import Fabric


log = logging.getLogger(__name__)

ENOUGH_HELD_OUT = 100  # held-out images from which the rejection threshold is taken from them alone


def check_selectors(selectors: Sequence[Selector]) -> tuple[Selector, ...]:
    """Return the selectors as a tuple; require at least one valid selector, with unique names."""
    if is_selector(selectors) or not isinstance(selectors, Sequence):
        raise TypeError(f"selectors must be a tuple, whose first selector predicts, got {selectors!r}")
    for selector in selectors:
        if not is_selector(selector):
            raise TypeError(f"a selector must be an object such as cps.MaxOutput(), got {selector!r}")
        if not isinstance(selector.name, str) or selector.name == REJECTION_KEY:
            raise ValueError(
                f"the name of a selector must be a string other than '{REJECTION_KEY}', got {selector.name!r}"
            )
    if not selectors or len({selector.name for selector in selectors}) < len(selectors):
        raise ValueError("selectors must contain at least one selector and no two of the same name")
    return tuple(selectors)


def missing_statistics(selectors: Sequence[Selector], network: SharedNetwork) -> Iterator[tuple[Selector, int]]:
    """Yield each selector with the index of each task that has no statistics of it, not even an empty dict."""
    for selector in selectors:
        for index, subnetwork in enumerate(network.subnetworks):
            if selector.name not in subnetwork.statistics:
                yield selector, index


def check_statistics(selectors: Sequence[Selector], network: SharedNetwork) -> None:
    """Raise `ValueError` if a linked selector has no statistics of an earlier task."""
    for selector, index in missing_statistics(selectors, network):
        if isinstance(selector, LinkedSelector):
            raise ValueError(
                f"{selector.name} has no statistics of task {index}; it must be among the learner's selectors from "
                "the first task on"
            )


def collect_statistics(
    network: SharedNetwork,
    subnetwork: Subnetwork,
    examples: Examples,
    held_out: Examples | None,
    selectors: Sequence[Selector],
    fabric: "Fabric",
    features: Callable[[Space | None], Tensor] | None = None,
) -> dict[str, Statistics]:
    """Return the statistics of the task learned last, whose subnetwork is the last of the network.

    Rejection thresholds come from held-out images alone if there are enough of them. `features` returns the
    examples' features in a space, if they are known.
    """
    evidence = gather_evidence(network, examples, fabric, features=features)
    if not all(part.isfinite().all() for part in evidence[-1]):
        raise FloatingPointError("training produced a subnetwork with NaN or infinite outputs; lower the learning rate")
    labels = read_labels(examples).to(network.device)
    for name in set(subnetwork.classes) - set(subnetwork.names(labels.unique())):
        log.warning("class %r had no training image", name)
    others = None if held_out is None else gather_evidence(network, held_out, fabric)
    are_enough = held_out is not None and len(held_out) >= ENOUGH_HELD_OUT
    collected: dict[str, Statistics] = {}
    for selector in selectors:
        earlier = network.statistics(selector.name)[:-1]
        kept = selector.observe(subnetwork, evidence, labels, earlier)
        if held_out is not None and others is not None and isinstance(selector, HeldOutSelector):
            own = read_labels(held_out).to(network.device)
            kept = {**kept, **selector.observe_held_out(others, own, [*earlier, kept])}
        if isinstance(selector, OpenSetSelector):
            training = None if are_enough else evidence
            kept = {**kept, **_distances(selector, subnetwork, training, labels, others, [*earlier, kept])}
        tensors = {key: value.to(network.device) for key, value in _check_kept(kept, selector.name).items()}
        collected[selector.name] = broadcast(tensors, fabric)
    logits = [] if others is None else [others[-1].logits]
    if not are_enough:
        logits.append(evidence[-1].logits)
    collected[REJECTION_KEY] = broadcast(rejection_statistics(torch.cat(logits), held_out=are_enough), fabric)
    return collected


def _distances(
    selector: OpenSetSelector,
    subnetwork: Subnetwork,
    training: Evidence | None,
    labels: Tensor,
    held_out: Evidence | None,
    statistics: Sequence[Statistics],
) -> Statistics:
    """Return the statistics of the relative distances of a task's held-out images, and of training images if given.

    Distances of training images are those without the image itself. `statistics` includes those of the task.
    """
    parts: list[tuple[Tensor, Tensor | None]] = []
    if held_out is not None:
        parts.append((held_out[-1].logits, selector.relative_distances(held_out, statistics)))
    if training is not None:
        some = spread_indices(len(labels)).to(labels.device)
        distances = selector.leave_one_out_distances(training, labels, statistics, some)
        parts.append((training[-1].logits[some], distances))
    known = [(logits, distances.to(logits.device)) for logits, distances in parts if distances is not None]
    if not known:
        return {}
    logits, distances = (torch.cat(values) for values in zip(*known, strict=True))
    return distance_statistics(logits, distances.float(), is_frozen=subnetwork.is_frozen)


def _check_kept(kept: Statistics, name: str) -> Statistics:
    """Return what a selector keeps as float32 tensors by name, which a model file can hold."""
    if not isinstance(kept, dict):
        raise TypeError(f"{name}.observe must return real tensors by name, got {type(kept).__name__}")
    for key, value in kept.items():
        if not isinstance(key, str) or not isinstance(value, Tensor) or value.is_complex():
            raise TypeError(f"{name}.observe must return real tensors by name, got {key!r}: {type(value).__name__}")
        if value.isnan().any():
            raise FloatingPointError(f"{name}.observe returned NaN in '{key}'; are the subnetwork's outputs too large?")
    return {key: value.detach().float() for key, value in kept.items()}
