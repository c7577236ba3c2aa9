"""Randomness by name: every draw has a key, so a resumed run draws what an uninterrupted one would."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

RNG_LOCK = threading.RLock()  # of threads that train


def derived_seed(*key: int) -> int:
    """Return a seed that depends on every number of the key."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))


def generator(*key: int) -> torch.Generator:
    """Return a fresh generator on the CPU for this key."""
    return torch.Generator().manual_seed(derived_seed(*key))


@contextmanager
def seeded(device: torch.device, *key: int) -> Iterator[None]:
    """Seed the generators of torch (dropout draws from it), numpy and Python for a while, then put them back.

    A process has one of each, so threads that do so take turns.
    """
    devices, seed = [device] if device.type == "cuda" else [], derived_seed(*key)
    with RNG_LOCK, torch.random.fork_rng(devices=devices):
        of_numpy, of_python = np.random.get_state(), random.getstate()
        _seed_torch(device, seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(of_numpy)
            random.setstate(of_python)


def _seed_torch(device: torch.device, seed: int) -> None:
    """Seed the CPU and one device; `torch.manual_seed` would seed all there are, which nobody puts back."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)
