"""Observation: what is kept about a task that has just been sealed. Numbers, never images."""

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cps.data.examples import Examples, all_labels
from cps.network.shared import SharedNetwork
from cps.runtime.devices import broadcast
from cps.selection.base import LinkedSelector, Selector, Statistics, is_selector
from cps.selection.gather import gather_evidence
from cps.selection.rejection import NAME, rejection_statistics

if TYPE_CHECKING:
    from lightning_fabric import Fabric


log = logging.getLogger(__name__)

ENOUGH = 100  # images held out of training that tell alone how familiar others look


def check_selectors(selectors: Sequence[Selector]) -> tuple[Selector, ...]:
    """Return the selectors of a learner; refuse none at all, what is none, and two of a name."""
    if is_selector(selectors) or not isinstance(selectors, Sequence):
        raise TypeError(f"selectors are a tuple, the first of which predicts, got {selectors!r} alone")
    for selector in selectors:
        if not is_selector(selector):
            raise TypeError(f"a selector is an object such as cps.MaxOutput(), got {selector!r}")
        if not isinstance(selector.name, str) or selector.name == NAME:
            raise ValueError(f"a selector has a name of its own, which is not '{NAME}', got {selector.name!r}")
    if not selectors or len({selector.name for selector in selectors}) < len(selectors):
        raise ValueError("at least one selector is needed to predict, and no two of the same name")
    return tuple(selectors)


def missing_statistics(selectors: Sequence[Selector], network: SharedNetwork) -> Iterator[tuple[Selector, int]]:
    """Yield each selector with the index of each task that it has kept nothing about, not even an empty dict."""
    for selector in selectors:
        for index, subnetwork in enumerate(network.subnetworks):
            if selector.name not in subnetwork.statistics:
                yield selector, index


def check_statistics(selectors: Sequence[Selector], network: SharedNetwork) -> None:
    """Refuse a selector that needs numbers about earlier tasks which were not kept."""
    for selector, index in missing_statistics(selectors, network):
        if isinstance(selector, LinkedSelector):
            raise ValueError(
                f"{selector.name} has kept no numbers about task {index}; it must be among the learner's selectors "
                "from the first task on"
            )


def _as_numbers(kept: Statistics, name: str) -> Statistics:
    """Return what a selector keeps in the form that a model file holds: tensors of float32 by name."""
    if not isinstance(kept, dict):
        raise TypeError(f"{name} must keep real tensors by name, got {type(kept).__name__}")
    for key, value in kept.items():
        if not isinstance(key, str) or not isinstance(value, Tensor) or value.is_complex():
            raise TypeError(f"{name} must keep real tensors by name, got {key!r}: {type(value).__name__}")
        if value.isnan().any():
            raise FloatingPointError(f"{name} would keep NaN as '{key}'; are the outputs of the subnetwork too large?")
    return {key: value.detach().float() for key, value in kept.items()}


def observe_last(
    network: SharedNetwork,
    examples: Examples,
    held_out: Examples | None,
    selectors: Sequence[Selector],
    fabric: "Fabric",
) -> None:
    """Let every selector keep its numbers about the task learned last, and note how familiar its images look.

    The latter is told from images that were held out of training, where there are enough.
    """
    subnetwork = network.subnetworks[-1]
    evidence = gather_evidence(network, examples, fabric)
    if not all(part.isfinite().all() for part in evidence[-1]):
        raise FloatingPointError("training left a subnetwork whose outputs are no numbers; lower the learning rate")
    labels = all_labels(examples).to(network.device)
    for name in set(subnetwork.classes) - set(subnetwork.names(labels.unique())):
        log.warning("class %r had no training image", name)
    for selector in selectors:
        kept = selector.observe(subnetwork, evidence, labels, network.statistics(selector.name)[:-1])
        numbers = {key: value.to(network.device) for key, value in _as_numbers(kept, selector.name).items()}
        subnetwork.statistics[selector.name] = broadcast(numbers, fabric)
    logits = [] if held_out is None else [gather_evidence(network, held_out, fabric)[-1].logits]
    are_enough = held_out is not None and len(held_out) >= ENOUGH
    if not are_enough:
        logits.append(evidence[-1].logits)
    subnetwork.statistics[NAME] = broadcast(rejection_statistics(torch.cat(logits), are_new=are_enough), fabric)
    network.release_images()
