"""Aside: work on a second stream of a GPU, beside the main one, until somebody waits for it."""

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from cps.runtime.cuda_streams import streams_of

Result = TypeVar("Result")

MOST_HELD = 2**27  # bytes of what is worked on; beyond them the main stream waits


class SideStream:
    """A second stream. What its work reads is held until the main stream has waited, so that nothing overwrites it."""

    def __init__(self, device: torch.device):
        self._stream = streams_of(torch.cuda.current_device() if device.index is None else device.index).aside
        self._held: list[Tensor] = []
        self._is_busy = False

    def start(self, work: Callable[[], Result], *reads: Tensor) -> Result:
        """Start work that reads these tensors, as soon as the main stream has come so far."""
        self._is_busy = True
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = work()
        self._held += reads
        if sum(tensor.nbytes for tensor in self._held) > MOST_HELD:
            self.join()
        return result

    def join(self) -> None:
        """Let the main stream wait for all that was started; a capture may not wait for what is no part of it."""
        if self._is_busy:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._is_busy = False
        self._held.clear()


class SameStream:
    """Where there are no streams, work is done at once."""

    def start(self, work: Callable[[], Result], *reads: Tensor) -> Result:
        """Do the work."""
        return work()

    def join(self) -> None:
        """Nothing is left to wait for."""


@lru_cache
def side_stream_of(device: torch.device) -> SideStream | SameStream:
    """Return the second stream of a GPU, or what stands for it on other devices."""
    return SideStream(device) if device.type == "cuda" else SameStream()
