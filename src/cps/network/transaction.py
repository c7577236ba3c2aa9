"""Transactions: a task is learned or forgotten as a whole, or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from cps.network.masks import Masks, find_changed
from cps.network.partition import Parts
from cps.network.shared import SharedNetwork
from cps.network.subnetwork import Subnetwork


class State(NamedTuple):
    """All of a network that learning or forgetting a task may change."""

    weights: dict[str, Tensor]
    taken: Masks
    subnetworks: list[Subnetwork]
    input_shape: tuple[int, ...] | None
    input_range: tuple[float, float] | None
    initial: dict[str, Tensor]
    parts: Parts


@contextmanager
def transaction(network: SharedNetwork) -> Iterator[State]:
    """Give the state before, and go back to it if anything goes wrong inside; other threads see one or the other."""
    with network.in_use():
        if network.is_changing:
            raise RuntimeError("a task is being learned or forgotten; until that is done, the learner only predicts")
        before = State(*(getattr(network, name) for name in State._fields))
        network.weights, network.subnetworks = {**before.weights}, [*before.subnetworks]
        network.is_changing = True
        try:
            yield before
        except BaseException:
            for name, value in before._asdict().items():
                setattr(network, name, value)
            network.clear_compact()
            raise
        finally:
            network.is_changing = False


@contextmanager
def learning(network: SharedNetwork) -> Iterator[None]:
    """Undo, if anything goes wrong inside, all that was learned there; so it is if a sealed weight has moved."""
    with torch.inference_mode(False), torch.enable_grad(), transaction(network) as before:
        yield
        moved = find_changed(before.weights, network.weights, before.taken)
        if moved is not None:
            raise RuntimeError(f"sealed weights of '{moved}' would have moved; nothing was learned")
