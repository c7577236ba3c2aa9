"""Locks and other state that all threads of the process share.

A thread that needs both takes `RNG_LOCK` before `CAPTURE_LOCK`. `cuda_graphs` keeps two more things for as long as
the process runs: the streams of each GPU, and graphs whose capture failed.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


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


RNG_LOCK = threading.RLock()  # held while the global random generators are seeded or drawn from
CAPTURE_LOCK = threading.RLock()  # threads share streams: nothing else may run on one that is being captured
STREAMS_LOCK = threading.Lock()  # held while the streams of a GPU are created
