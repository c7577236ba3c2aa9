"""Seeds by key: reproducible, independent, and without effect on the caller's random numbers."""

import random
import threading

import numpy as np
import torch

from cps.runtime.process_state import RNG_LOCK
from cps.runtime.seeding import derive_seed, generator, seeded

CPU = torch.device("cpu")


def draw():
    return float(torch.rand(())), float(np.random.rand()), random.random()


def test_a_seed_depends_on_every_number_of_the_key():
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1), (2, 0, 0)]
    assert len({derive_seed(*key) for key in keys}) == len(keys)
    assert derive_seed(3, 1) == derive_seed(3, 1)
    assert torch.equal(torch.rand(3, generator=generator(3, 1)), torch.rand(3, generator=generator(3, 1)))


def test_seeds_never_change():
    """A checkpoint of an earlier version must resume with the same numbers."""
    assert derive_seed(0, 1, 2) == int(np.random.SeedSequence((0, 1, 2)).generate_state(1, np.uint64)[0]) >> 1


def test_torch_numpy_and_python_are_seeded_and_restored():
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    before = draw()
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    with seeded(CPU, 1, 2):
        first = draw()
    with seeded(CPU, 1, 2):
        assert draw() == first
    with seeded(CPU, 1, 3):
        assert draw() != first
    assert draw() == before


def test_only_one_thread_at_a_time_is_seeded():
    taken = []
    with seeded(CPU, 0):
        thread = threading.Thread(target=lambda: taken.append(RNG_LOCK.acquire(blocking=False)))
        thread.start()
        thread.join()
    assert taken == [False]


def test_seeding_one_device_leaves_the_others_unchanged(monkeypatch):
    def fail(seed):
        raise AssertionError("all GPUs would be seeded, and none restored")

    monkeypatch.setattr(torch.cuda, "manual_seed_all", fail)
    before = torch.get_rng_state()
    with seeded(CPU, 1):
        first = torch.rand(3)
    with seeded(CPU, 1):
        assert torch.equal(torch.rand(3), first)
    assert torch.equal(torch.get_rng_state(), before)
