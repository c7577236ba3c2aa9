"""Arrivals: what lies in a folder, and which files of it are new or have changed since another look."""

import os
import re
from pathlib import Path
from typing import NamedTuple


class State(NamedTuple):
    """What changes when a file does: its size, and the time of its last change."""

    size: int
    changed: float


def inside(folder: Path) -> list[Path]:
    """Return all that is in a folder and the folders in it, but for what is hidden."""
    found: list[Path] = []
    for root, folders, files in os.walk(folder):  # which passes over folders that are gone meanwhile
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(root, name) for name in (*folders, *files) if not name.startswith(".")]
    return sorted(found, key=in_counting_order)


def in_counting_order(path: Path) -> tuple[object, ...]:
    """Return a key that puts frame-2 before frame-10."""

    def key(name: str) -> tuple[object, str]:
        return tuple(int(piece) if piece.isdecimal() else piece for piece in re.split(r"(\d+)", name)), name

    return tuple(map(key, path.parts))


def states_in(folder: Path) -> dict[Path, State | None]:
    """Return the state of all that is in a folder."""
    return {path: state_of(path) for path in inside(folder)}


def state_of(path: Path) -> State | None:
    """Return the state of a file; None for one that is gone, or empty so far."""
    try:
        found = path.stat()
    except OSError:
        return None
    return State(found.st_size, found.st_mtime) if found.st_size else None
