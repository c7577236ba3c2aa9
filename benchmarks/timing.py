"""Times as ratios: ours and plain PyTorch's in turns, since these machines are never quiet."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from cps.network.cost import seconds_of

LONG_ENOUGH = 1.0  # seconds of measuring


def compare(
    ours: Callable[[], object], baseline: Callable[[], object], device: torch.device, *, pairs: int
) -> tuple[float, float, float]:
    """Return the median seconds of each and the median ratio of neighbours, taken in turns after a warm-up.

    What is short is repeated more often than so many pairs: a moment's disturbance would otherwise be all of it.
    """
    for _ in range(2 if device.type == "cpu" else 5):
        ours()
        baseline()
    times, began = [], time.perf_counter()
    while len(times) < pairs or time.perf_counter() - began < LONG_ENOUGH:
        times.append((seconds_of(ours, device), seconds_of(baseline, device)))
    first, second = zip(*times, strict=True)
    return statistics.median(first), statistics.median(second), statistics.median(a / b for a, b in times)


def ready(make: Callable[[], Callable[[], object]], device: torch.device) -> tuple[Callable[[], object], float]:
    """Return what is made, once it has run, and the seconds that took."""
    began = time.perf_counter()
    made = make()
    seconds_of(made, device)  # which waits for the GPU
    return made, time.perf_counter() - began


def row(what: str, ours: float, baseline: float, ratio: float, limit: float | None) -> dict[str, Any]:
    """Return one line of the table about seconds; `limit` is what the ratio should stay below."""
    return entry(what, f"{1000 * ours:.2f} ms", f"{1000 * baseline:.2f} ms", ratio, limit)


def entry(what: str, ours: str, baseline: str, ratio: float, limit: float | None = None) -> dict[str, Any]:
    """Return one line of the table about anything."""
    return {"what": what, "ours": ours, "baseline": baseline, "ratio": ratio, "limit": limit}
