"""Randomness by name: every draw has a key, so a resumed run draws what an uninterrupted one would."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derived_seed(*key: int) -> int:
    """Return a seed that depends on every number of the key."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))


def generator(*key: int) -> torch.Generator:
    """Return a fresh generator on the CPU for this key."""
    return torch.Generator().manual_seed(derived_seed(*key))


@contextmanager
def seeded(device: torch.device, *key: int) -> Iterator[None]:
    """Seed torch's own generators (dropout draws from them) for a while, then put them back."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(derived_seed(*key))
        yield
