"""Random numbers by key: a resumed run draws the same numbers as an uninterrupted one."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from cps.runtime.process_state import RNG_LOCK


def derive_seed(*key: int) -> int:
    """Return a seed that depends on every number of the key, except for zeros at its end."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))


def generator(*key: int) -> torch.Generator:
    """Return a new CPU generator seeded with the key."""
    return torch.Generator().manual_seed(derive_seed(*key))


@contextmanager
def seeded(device: torch.device, *key: int) -> Iterator[None]:
    """Seed the global generators of torch, numpy and Python inside the block, then restore their states.

    Dropout, for example, draws from torch's. The generators are process-wide, so only one thread at a time is inside.
    """
    devices, seed = [device] if device.type == "cuda" else [], derive_seed(*key)
    with RNG_LOCK, torch.random.fork_rng(devices=devices):
        numpy_state, python_state = np.random.get_state(), random.getstate()
        _seed_torch(device, seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(numpy_state)
            random.setstate(python_state)


def _seed_torch(device: torch.device, seed: int) -> None:
    """Seed the CPU and one device; `torch.manual_seed` would seed every GPU, and `fork_rng` restores only this one."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)
