"""Streams of a GPU: few and kept, since libraries hold memory for every stream they have worked on (cuBLAS 32 MiB)."""

from functools import lru_cache
from threading import Lock
from typing import NamedTuple

import torch

BESIDE = 16  # networks that run side by side

_MAKING = Lock()


class Streams(NamedTuple):
    """Streams of one GPU, none of them the main one."""

    apart: torch.cuda.Stream  # for calls before a capture
    recorded: torch.cuda.Stream  # for captures ...
    beside: tuple[torch.cuda.Stream, ...]  # ... and for what is captured side by side
    aside: torch.cuda.Stream  # for the second thing that a step does


def streams_of(device: int) -> Streams:
    """Return the streams of a GPU, the same each time."""
    with _MAKING:
        return _made(device)


@lru_cache
def _made(device: int) -> Streams:
    apart, recorded, aside, *beside = (torch.cuda.Stream(device) for _ in range(3 + BESIDE))
    return Streams(apart, recorded, tuple(beside), aside)
