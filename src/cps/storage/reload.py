"""Following a file: what was made of it is made anew when it changes."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from cps.storage.container import stamp_of

log = logging.getLogger(__name__)

AGAIN = 60.0  # seconds after which a file that was no good is tried once more: memory may be free again

Made = TypeVar("Made")


class ReloadedFile(Generic[Made]):
    """What was made of a file. Where a changed file is no good, the old thing stays, and `problem` says why."""

    def __init__(self, path: Path, make: Callable[[], Made]):
        self.problem: str | None = None
        self._path, self._make, self._stamp = path, make, stamp_of(path)
        self._tried = 0.0
        self.made = make()

    def refresh(self) -> bool:
        """Make it anew if the file has changed, and say whether that was done."""
        stamp = stamp_of(self._path)
        is_due = self.problem is not None and time.monotonic() > self._tried + AGAIN
        if stamp == self._stamp and not is_due:
            return False
        self._stamp = stamp
        try:
            self.made = self._make()
        except Exception as error:  # whatever is wrong with the new file
            self._note(str(error).encode("utf-8", "replace").decode())
            return False
        self.problem = None
        return True

    def _note(self, problem: str) -> None:
        self._tried = time.monotonic()
        if problem != self.problem:
            log.warning("the old model stays: %s", problem)
        self.problem = problem
