"""Lock a file that only one program at a time may change. The system releases the lock of a killed program."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from cps.storage.atomic import writable_folder


class LockedError(RuntimeError):
    """Another program is changing the file."""


@contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Hold the lock of a file, which need not exist; raise `LockedError` if another program holds it.

    The lock is a hidden file beside it, which is removed at the end.
    """
    path = Path(path).resolve()
    if path.is_dir():
        raise IsADirectoryError(f"'{path}' is a folder, not a file")
    lock_file = path.with_name(f".{path.name}.lock")
    with writable_folder(path):
        lock_file.touch()
    lock = _acquire(lock_file, path)
    try:
        yield
    finally:
        if os.name == "posix":  # on Windows, `release` removes the file
            lock_file.unlink(missing_ok=True)  # before the release: after it, the file may be another program's lock
        lock.release()


class _RemovedError(Exception):
    """The lock file was removed by its last holder after we had opened it, so a lock on it excludes nobody."""


def _acquire(lock_file: Path, path: Path) -> FileLock:
    def check_not_removed(descriptor: int) -> None:
        # filelock checks this by the number of links, but NFS only renames a removed file that is still open.
        if os.name == "posix" and not _is_same_file(descriptor, lock_file):
            raise _RemovedError

    # No soft lock as a fallback: that would outlive a killed program.
    lock = FileLock(lock_file, fallback_to_soft=False, on_acquired=check_not_removed)
    while True:
        try:
            lock.acquire(timeout=0)
            return lock
        except _RemovedError:
            continue
        except Timeout:
            if lock_file.exists():  # else it was removed, as above
                raise LockedError(
                    f"another program is changing '{path}'; wait until it has finished, then run the command again"
                ) from None
        except OSError as error:
            lock_file.unlink(missing_ok=True)
            raise RuntimeError(
                f"the file system of '{path}' does not support locks ({error.strerror}); use another file system"
            ) from None


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
