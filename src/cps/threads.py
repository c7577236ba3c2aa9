"""Threads: who may use a network, and when."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class OneAtATime:
    """A lock that one thread at a time holds, as often as it likes; what is copied or pickled has one of its own."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type["OneAtATime"], tuple[Any, ...]]:
        return OneAtATime, ()


class AloneOrTogether:
    """A lock that one thread holds alone, or any number together."""

    def __init__(self) -> None:
        self._alone, self._counting, self._together = threading.Lock(), threading.Lock(), 0

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the lock when nobody else does."""
        with self._alone:
            yield

    @contextmanager
    def together(self) -> Iterator[None]:
        """Hold the lock with others that do the same; the first takes it for all, and the last gives it back."""
        with self._counting:
            if not self._together:
                self._alone.acquire()
            self._together += 1
        try:
            yield
        finally:
            with self._counting:
                self._together -= 1
                if not self._together:
                    self._alone.release()
