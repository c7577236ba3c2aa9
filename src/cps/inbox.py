"""An inbox: images in files and folders are predicted as they are found, or as they arrive.

Images are decoded in parallel while the model looks at those before them, so a long list needs little memory.
"""

import glob
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, groupby, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from cps.folders import SUFFIXES, ImageError, decode_image
from cps.learner import Learner

TOGETHER = 256  # images that are looked at together, unless a group is larger
PATIENCE = 5.0  # seconds that a file which cannot be read may still be being written


@dataclass(frozen=True)
class Answer:
    """What the model says about a file: class, task (from 0) and confidence; or `error`, where it cannot be read.

    The class is None where the image looks like none that was learned; the task is then the nearest.
    """

    path: Path
    label: str | None = None
    task: int | None = None
    confidence: float | None = None
    error: str = ""


def find_images(places: Iterable[str | Path]) -> list[Path]:
    """Return the images that files, folders (with all folders in them) and patterns such as *.jpg name, in order.

    A file that is named is taken whatever it is called, and even if it is not there, which its answer will say; one
    that is named twice is taken once.
    """
    found: dict[Path, None] = {}
    missing = []
    for place in places:
        path = Path(place)
        paths = [path] if path.exists() else [Path(name) for name in sorted(glob.glob(str(place), recursive=True))]
        missing += [] if paths else [path]
        for one in paths or [path]:
            found |= dict.fromkeys(_images_in(one) if one.is_dir() else [one])
    if missing and len(missing) == len(found):
        raise FileNotFoundError(f"there is no file or folder '{missing[0]}', and nothing fits it as a pattern")
    if not found:
        raise FileNotFoundError(f"there is no image in {', '.join(f'{str(place)!r}' for place in places)}")
    return list(found)


def by_number(paths: Sequence[Path], number: int) -> Iterator[list[Path]]:
    """Yield groups of so many files each; the last may have fewer."""
    if number < 1:
        raise ValueError(f"a group has one image or more, got {number}")
    for start in range(0, len(paths), number):
        yield list(paths[start : start + number])


def by_folder(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Yield groups of files that lie in one folder."""
    for _, group in groupby(sorted(paths, key=lambda path: (path.parent, path)), lambda path: path.parent):
        yield list(group)


def answers(
    learner: Learner, groups: Iterable[list[Path]], size: int, *, reject: float = 0.0, workers: int = 8
) -> Iterator[Answer]:
    """Yield an answer for each file, in order; the files of a group are assumed to share a task.

    A share `reject` of images that are known may be taken for unknown.
    """
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[list[list[tuple[Path, Future]]]] = deque()
        for batch in _batches(groups):
            waiting.append([[(path, pool.submit(decode_image, path, size)) for path in group] for group in batch])
            if len(waiting) == 2:
                yield from _look(learner, waiting.popleft(), reject)
        while waiting:
            yield from _look(learner, waiting.popleft(), reject)


def watch(
    learner: Learner,
    folder: Path,
    size: int,
    *,
    reject: float = 0.0,
    interval: float = 0.5,
    until: Callable[[], bool] = lambda: False,
) -> Iterator[Answer]:
    """Return an iterator of answers for images that are new in a folder from now on, once they have stopped growing.

    One that cannot be read may be half written: it is tried again until it has not changed for some seconds. One that
    changes later is new again.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder '{folder}' to watch")
    return _watch(learner, folder, size, reject, interval, until, _states(folder))


class State(NamedTuple):
    """What changes when a file does: its size, and the time of its last change."""

    size: int
    changed: float


def _watch(
    learner: Learner,
    folder: Path,
    size: int,
    reject: float,
    interval: float,
    until: Callable[[], bool],
    handled: dict[Path, State | None],
) -> Iterator[Answer]:
    before: dict[Path, State | None] = {}
    while not until():
        now = _states(folder)
        still = {path: state for path, state in now.items() if state and before.get(path) == state}
        ready = [[path] for path, state in still.items() if handled.get(path) != state]
        for answer in answers(learner, ready, size, reject=reject):
            state = still[answer.path]
            if _state(answer.path) != state:
                continue  # it changed while it was looked at, so what was seen may be a part
            if not answer.error or time.time() - state.changed > PATIENCE:
                handled[answer.path] = state
                yield answer
        before = now
        time.sleep(interval)


def _images_in(folder: Path) -> list[Path]:
    inside = (path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    return sorted(p for p in inside if p.is_file() and not any(n.startswith(".") for n in p.relative_to(folder).parts))


def _states(folder: Path) -> dict[Path, State | None]:
    """Return the state of every image in a folder; none if it changes too fast to be listed, until the next look."""
    try:
        return {path: _state(path) for path in _images_in(folder)}
    except FileNotFoundError:
        return {}


def _state(path: Path) -> State | None:
    """Return the state of a file; None for one that is gone, or empty so far."""
    try:
        found = path.stat()
    except OSError:
        return None
    return State(found.st_size, found.st_mtime) if found.st_size else None


def _batches(groups: Iterable[list[Path]]) -> Iterator[list[list[Path]]]:
    """Yield lists of groups that hold as many images as are looked at together, or one group."""
    coming = iter(groups)
    for group in coming:
        number = max(1, TOGETHER // len(group))
        yield [group, *islice(coming, number - 1)]


def _look(learner: Learner, batch: list[list[tuple[Path, Future]]], reject: float) -> Iterator[Answer]:
    """Yield the answers for groups whose images are being decoded; groups of one size are looked at together."""
    read = [[(path, _result(future)) for path, future in group] for group in batch]
    good = [[(path, image) for path, image in group if not isinstance(image, ImageError)] for group in read]
    said: dict[Path, Answer] = {}
    for number in {len(group) for group in good} - {0}:
        said |= _said(learner, [pair for group in good if len(group) == number for pair in group], number, reject)
    for path, image in chain.from_iterable(read):
        yield Answer(path, error=str(image)) if isinstance(image, ImageError) else said[path]


def _said(
    learner: Learner, images: list[tuple[Path, np.ndarray]], group_size: int, reject: float
) -> dict[Path, Answer]:
    pixels = torch.from_numpy(np.stack([image for _, image in images]))
    found = learner.predict(pixels, group_size=group_size, reject=reject)
    rows = zip(images, found.classes, found.tasks.tolist(), found.confidence.tolist(), strict=True)
    return {
        path: Answer(path, None if name is None else str(name), task, share) for (path, _), name, task, share in rows
    }


def _result(future: Future) -> np.ndarray | ImageError:
    try:
        return future.result()
    except ImageError as error:
        return error
