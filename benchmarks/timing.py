"""Compare times as ratios: ours and the baseline alternate, because other work on the machine changes its speed."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from cps.network.cost import measure_seconds

MIN_SECONDS = 1.0  # of measuring


def compare(
    ours: Callable[[], object], baseline: Callable[[], object], device: torch.device, *, pairs: int
) -> tuple[float, float, float]:
    """Return the median seconds of each, and the median ratio of neighbouring measurements, after a warm-up.

    Short work is repeated more often than `pairs` times, so that a short disturbance does not decide the result.
    """
    for _ in range(2 if device.type == "cpu" else 5):
        ours()
        baseline()
    times, start = [], time.perf_counter()
    while len(times) < pairs or time.perf_counter() - start < MIN_SECONDS:
        times.append((measure_seconds(ours, device), measure_seconds(baseline, device)))
    first, second = zip(*times, strict=True)
    return statistics.median(first), statistics.median(second), statistics.median(a / b for a, b in times)


def measure_start(make: Callable[[], Callable[[], object]], device: torch.device) -> tuple[Callable[[], object], float]:
    """Make a function and run it once; return it, and the seconds until it had run."""
    start = time.perf_counter()
    work = make()
    measure_seconds(work, device)  # waits for the GPU
    return work, time.perf_counter() - start


def time_row(label: str, ours: float, baseline: float, ratio: float, limit: float | None) -> dict[str, Any]:
    """Return a row of the table about times in seconds; the ratio should not exceed `limit`."""
    return make_row(label, f"{1000 * ours:.2f} ms", f"{1000 * baseline:.2f} ms", ratio, limit)


def make_row(label: str, ours: str, baseline: str, ratio: float, limit: float | None = None) -> dict[str, Any]:
    """Return a row of the table about anything; the ratio should not exceed `limit`."""
    return {"what": label, "ours": ours, "baseline": baseline, "ratio": ratio, "limit": limit}
