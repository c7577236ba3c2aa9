"""Following a file: what was made of it is made anew when it changes."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from cps.storage import stamp_of

log = logging.getLogger(__name__)

Made = TypeVar("Made")


class Followed(Generic[Made]):
    """What was made of a file. Where a changed file is no good, the old thing stays, and `problem` says why."""

    def __init__(self, path: Path, make: Callable[[], Made]):
        self.problem: str | None = None
        self._path, self._make, self._stamp = path, make, stamp_of(path)
        self.made = make()

    def refresh(self) -> bool:
        """Make it anew if the file has changed, and say whether that was done."""
        stamp = stamp_of(self._path)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            self.made = self._make()
        except Exception as error:  # whatever is wrong with the new file
            self.problem = str(error).encode("utf-8", "replace").decode()
            log.warning("the old model stays: %s", self.problem)
            return False
        self.problem = None
        return True
