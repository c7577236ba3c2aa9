"""Reload a file when it changes."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from cps.storage.atomic import file_version

log = logging.getLogger(__name__)

RETRY_SECONDS = 60.0  # after which a file that failed to load is tried again: there may be memory for it now

Value = TypeVar("Value")


class ReloadedFile(Generic[Value]):
    """A value loaded from a file. If a changed file fails to load, the old value stays and `problem` says why."""

    def __init__(self, path: Path, load: Callable[[], Value]):
        self.problem: str | None = None
        self._path, self._load, self._version = path, load, file_version(path)
        self._failed_at = 0.0
        self.value = load()

    def refresh(self) -> bool:
        """Load the file again if it has changed; return True if there is a new value."""
        version = file_version(self._path)
        is_retry_due = self.problem is not None and time.monotonic() > self._failed_at + RETRY_SECONDS
        if version == self._version and not is_retry_due:
            return False
        self._version = version
        try:
            self.value = self._load()
        except Exception as error:  # whatever is wrong with the new file
            self._set_problem(str(error).encode("utf-8", "replace").decode())
            return False
        self.problem = None
        return True

    def _set_problem(self, problem: str) -> None:
        self._failed_at = time.monotonic()
        if problem != self.problem:
            log.warning("keeping the old model: %s", problem)
        self.problem = problem
