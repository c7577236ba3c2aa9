"""Describe the hardware and software that a result was produced on."""

import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import cps

if TYPE_CHECKING:
    from lightning_fabric import Fabric

IMPORTED = time.monotonic()


def describe_device(fabric: "Fabric") -> str:
    """Return the name and number of the devices of a run."""
    if fabric.device.type == "cuda":
        return f"{fabric.world_size} x {torch.cuda.get_device_name(fabric.device)}"
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":")[1].strip() for line in info.read_text(encoding="utf-8").splitlines() if "model name" in line
        ]
        name = names[0] if names else name
    return f"CPU ({name}, {torch.get_num_threads()} threads, {fabric.world_size} process(es))"


def versions() -> dict[str, str]:
    """Return the versions of the software that a result depends on."""
    return {"cps": cps.__version__, "torch": torch.__version__, "python": platform.python_version()}


def reproducibility_context(device: torch.device) -> str:
    """Return the hardware and software on which predictions depend to the bit."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} thread(s)"
    return f"torch {torch.__version__}, {platform.machine()}, {where}, {torch.backends.cpu.get_cpu_capability()}"


def free_memory() -> int:
    """Return the free memory in bytes, or 8 GiB if the system does not report it."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 8 * 2**30


def busy_warning() -> str | None:
    """Return a warning if torch uses several threads, but other programs leave no core free; None otherwise."""
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    if threads == 1 or not hasattr(os, "getloadavg"):
        return None
    ours = min(threads, time.process_time() / max(time.monotonic() - IMPORTED, 1.0))
    others = os.getloadavg()[0] - ours
    if others < cores - 0.5:
        return None
    return (
        f"other programs keep all {cores} cores busy, so training with {threads} threads may take ten times as long as "
        "with one; set OMP_NUM_THREADS to the number of free cores, or to 1"
    )
