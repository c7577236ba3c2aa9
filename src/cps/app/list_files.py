"""List the files of a folder in natural order, and record their states to notice changes.

This module does not import torch, so that `cps predict --watch` can list a folder before it loads anything slow.
"""

import os
import re
from pathlib import Path
from typing import NamedTuple


class FileState(NamedTuple):
    """The size and modification time of a file. They differ after the file has changed."""

    size: int
    modified: float


def list_files(folder: Path) -> list[Path]:
    """Return all files and folders in a folder and its subfolders in natural order, without hidden ones."""
    found: list[Path] = []
    for root, folders, files in os.walk(folder):  # os.walk ignores folders that are removed meanwhile
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(root, name) for name in (*folders, *files) if not name.startswith(".")]
    return sorted(found, key=natural_order)


def natural_order(path: Path) -> tuple[object, ...]:
    """Return a sort key that puts frame-2 before frame-10."""

    def key(name: str) -> tuple[object, str]:
        return tuple(int(piece) if piece.isdecimal() else piece for piece in re.split(r"(\d+)", name)), name

    return tuple(map(key, path.parts))


def file_states(folder: Path) -> dict[Path, FileState | None]:
    """Return the state of everything in a folder."""
    return {path: file_state(path) for path in list_files(folder)}


def file_state(path: Path) -> FileState | None:
    """Return the state of a file; None if it is missing or still empty."""
    try:
        status = path.stat()
    except OSError:
        return None
    return FileState(status.st_size, status.st_mtime) if status.st_size else None
