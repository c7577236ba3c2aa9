"""A lock on a file that two programs must not change at once; the system takes it off one that was killed."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cps.storage.container import folder_of


class LockedError(RuntimeError):
    """Another program is changing the file."""


@contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Hold the lock of a file, which need not exist; raise `LockedError` if another program holds it.

    The lock is on a hidden file beside it, which is removed at the end.
    """
    path = Path(path).resolve()
    if path.is_dir():
        raise IsADirectoryError(f"'{path}' is a folder, not a file")
    beside = path.with_name(f".{path.name}.lock")
    with folder_of(path):
        descriptor = _opened(beside, path)
    try:
        yield
    finally:
        if os.name == "posix":
            beside.unlink(missing_ok=True)  # while it is held, so that nobody waits for a file that is gone
        os.close(descriptor)
        with suppress(OSError):  # Windows removes no file that is open
            if os.name != "posix":
                beside.unlink(missing_ok=True)


def _opened(beside: Path, path: Path) -> int:
    """Return the descriptor of the lock's file, locked."""
    while True:
        descriptor = os.open(beside, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(descriptor)
        except (BlockingIOError, PermissionError):
            os.close(descriptor)
            raise LockedError(
                f"another program is changing '{path}' now; wait until it is done, then give the command again"
            ) from None
        except OSError as error:
            os.close(descriptor)
            beside.unlink(missing_ok=True)
            raise RuntimeError(
                f"the file system of '{path}' knows no locks ({error.strerror}); keep the model on another one"
            ) from None
        if os.name != "posix" or _is_same(descriptor, beside):
            return descriptor
        os.close(descriptor)  # its last holder removed it between our two steps


def _lock(descriptor: int) -> None:
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_same(descriptor: int, beside: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), beside.stat())
    except FileNotFoundError:
        return False
