"""Replace files atomically: a reader sees the old content or the new, never a part."""

import glob
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

WAIT_SECONDS = 2.0 if os.name == "nt" else 0.0  # for readers, which on Windows keep a file from being replaced
STALE_SECONDS = 3600  # without a change; then the writer of a temporary file is taken for dead

FileVersion = tuple[int, int, int]


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yield a temporary file beside `path`; at the end of the block, sync it to the disk and move it to `path`.

    If the block raises, `path` stays as it was. Each writer has its own temporary file, so with several writers the
    last one wins, with its whole content.
    """
    path = Path(path).resolve()  # replace the target of a link, not the link
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    with writable_folder(path):
        temporary.touch()
    try:
        mode = (path if path.exists() else temporary).stat().st_mode
        yield temporary
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())
        temporary.chmod(mode)  # safetensors writes files that only their owner may read
        _replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise OSError(f"could not write '{path}' ({error}); the file that was there is untouched") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)
    remove_temporary(path)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


@contextmanager
def writable_folder(path: Path) -> Iterator[None]:
    """Create the folder of a file. An `OSError` in the block names that folder, not a hidden file in it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise type(error)(f"cannot write in '{path.parent}' ({error.strerror})") from None


def remove(path: Path, *, min_age: float = STALE_SECONDS) -> None:
    """Remove a file if it exists, and the temporary files that killed writers left of it."""
    path.unlink(missing_ok=True)
    remove_temporary(path, min_age=min_age)


def remove_temporary(path: Path, *, min_age: float = STALE_SECONDS) -> None:
    """Remove the temporary files that killed writers of `path` left, if they are at least `min_age` seconds old."""
    for temporary in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        with suppress(OSError):
            if time.time() - temporary.stat().st_mtime >= min_age:
                temporary.unlink()


def file_version(path: Path) -> FileVersion | None:
    """Return a value that changes when the file is replaced, without reading it; None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _replace(temporary: Path, path: Path, seconds: float = WAIT_SECONDS) -> None:
    """Move a file to `path`; wait at most some seconds while the system does not permit it."""
    end = time.monotonic() + seconds
    while True:
        try:
            temporary.replace(path)
            return
        except PermissionError:
            if time.monotonic() >= end:
                raise
            time.sleep(0.01)


def _sync_folder(folder: Path) -> None:
    """Sync the move itself to the disk, if the system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
