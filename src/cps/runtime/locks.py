"""Threads: who may use a network, and when."""

import threading
from typing import Any


class CopyableLock:
    """A lock that one thread at a time holds, as often as it likes; what is copied or pickled has one of its own."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type["CopyableLock"], tuple[Any, ...]]:
        return CopyableLock, ()
