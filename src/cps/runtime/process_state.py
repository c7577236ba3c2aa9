"""Everything that the whole process shares: locks, caches, worker threads and switches of torch.

Only `cuda_graphs` keeps more for as long as the process runs: the streams of each GPU, and graphs whose capture failed;
and `settings_codec` the registry of settings that files can name.
A thread that needs both takes `RNG_LOCK` before `CAPTURE_LOCK`.
"""

import os
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

RNG_LOCK = threading.RLock()  # held while the global random generators are seeded or drawn from
CAPTURE_LOCK = threading.RLock()  # threads share streams: nothing else may run on one that is being captured
STREAMS_LOCK = threading.Lock()  # held while the streams of a GPU are created
TRACE_LOCK = threading.Lock()  # torch.fx patches nn.Module for the whole process while it traces

# Caches of selectors, keyed by a tensor of their statistics; an entry disappears with its tensor.
PRECOMPUTED: MutableMapping[Tensor, dict[Any, Any]] = WeakTensorKeyDictionary()
PRECOMPUTED_LOCK = threading.Lock()  # held while an entry of it is added or removed
SELECTOR_GRAPHS: MutableMapping[Tensor, dict[Any, Any]] = WeakTensorKeyDictionary()

EXACT = ContextVar("exact", default=False)  # True while photos are to be computed in full precision on every CPU

# Triton kernels to compile instead of launching them: one dictionary for each open `compile_in_parallel`.
PENDING_KERNELS: list[dict[Any, Callable[[], object]]] = []


def thread_pool() -> ThreadPoolExecutor:
    """Return a pool of as many workers as torch has threads, in each of which torch uses one thread."""
    return _thread_pool(torch.get_num_threads(), os.getpid())


@lru_cache
def _thread_pool(num_threads: int, process: int) -> ThreadPoolExecutor:
    """Return the pool of a process; a forked process needs its own."""
    pool = ThreadPoolExecutor(num_threads, "cps", initializer=partial(torch.set_num_threads, 1))
    barrier = threading.Barrier(num_threads)
    list(pool.map(lambda _: barrier.wait(), range(num_threads)))  # starts every worker, hence runs every initializer
    torch.set_num_threads(num_threads)  # the workers have changed the default for threads that start later
    return pool


@lru_cache
def constant(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the values as a tensor that is made once per device: a captured step must not copy from the CPU."""
    return torch.tensor(values, device=device, dtype=dtype)


class CopyableLock:
    """A re-entrant lock. Copies and pickles of an object that holds one get a fresh lock."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type["CopyableLock"], tuple[Any, ...]]:
        return CopyableLock, ()


class SharedSettings:
    """Attributes of other objects, set while at least one thread is inside `applied()`.

    The first thread to enter sets the values; the last one to leave restores the old ones.
    """

    def __init__(self, settings: Sequence[tuple[Any, str, Any]]):
        self._settings = settings  # (object, attribute, value)
        self._lock, self._users, self._before = threading.Lock(), 0, []

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Keep the values set inside the block."""
        with self._lock:
            if self._users == 0:
                self._before = [getattr(owner, name) for owner, name, _ in self._settings]
                for owner, name, value in self._settings:
                    setattr(owner, name, value)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    for (owner, name, _), value in zip(self._settings, self._before, strict=True):
                        setattr(owner, name, value)


_BACKENDS: Any = torch.backends
DETERMINISTIC_CUDNN = SharedSettings([(_BACKENDS.cudnn, "benchmark", False), (_BACKENDS.cudnn, "deterministic", True)])
FULL_PRECISION = SharedSettings(
    [(_BACKENDS.cudnn.conv, "fp32_precision", "ieee"), (_BACKENDS.cuda.matmul, "fp32_precision", "ieee")]
    if hasattr(_BACKENDS.cudnn, "conv")
    else [(_BACKENDS.cudnn, "allow_tf32", False), (_BACKENDS.cuda.matmul, "allow_tf32", False)]  # before torch 2.9
)
