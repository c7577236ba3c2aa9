"""An inbox: images in files and folders are predicted as they are found, or as they arrive.

Images are decoded in parallel while the model looks at those before them, so a long list needs little memory.
"""

import glob
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from pathlib import Path

import numpy as np
import torch

from cps.app.watch_folder import State, in_counting_order, inside, state_of, states_in
from cps.data.decode import ImageError, decode_image
from cps.data.image_folder import KNOWN, SUFFIXES
from cps.data.images import side_of
from cps.learner import Learner
from cps.selection.predict import Prediction
from cps.selection.stream import Stream

log = logging.getLogger(__name__)

TOGETHER = 256  # images that are looked at together, unless a group is larger
PATIENCE = 5.0  # seconds that a file which cannot be read may still be being written


@dataclass(frozen=True)
class Answer:
    """What the model says about a file: class, task (from 0), the task's share and the class's confidence.

    Or `error`, where it cannot be read.

    The class is None where the image looks like none that was learned; the task is then the nearest.
    """

    path: Path
    label: str | None = None
    task: int | None = None
    share: float | None = None
    confidence: float | None = None
    error: str = ""


def find_images(places: Iterable[str | Path]) -> list[Path]:
    """Return the images that files, folders (with all folders in them) and patterns such as *.jpg name, in order.

    A file that is named is taken whatever it is called, and even if it is not there, which its answer will say; one
    that is named twice is taken once.
    """
    found: dict[str, Path] = {}  # by where they lie
    missing = []
    for place in places:
        path = Path(place)
        paths = [path] if path.exists() else _fitting(str(place))
        missing += [] if paths else [path]
        for one in paths or [path]:
            for image in _images_in(one) if one.is_dir() else [one]:
                found.setdefault(os.path.abspath(image), image)
    if missing and len(missing) == len(found):
        raise FileNotFoundError(f"there is no file or folder '{missing[0]}', and nothing fits it as a pattern")
    if not found:
        named = ", ".join(f"'{place}'" for place in places)
        raise FileNotFoundError(f"there is no image in {named}; known are {KNOWN}")
    return list(found.values())


def overlooked(places: Iterable[str | Path]) -> list[Path]:
    """Return the files in the folders among some places that are not taken for images; hidden ones are not meant."""
    folders = [Path(place) for place in places if Path(place).is_dir()]
    return [path for folder in folders for path in inside(folder) if not path.is_dir() and not _is_image(path)]


def by_number(paths: Sequence[Path], number: int) -> Iterator[list[Path]]:
    """Yield groups of so many files each; the last may have fewer."""
    if number < 1:
        raise ValueError(f"a group has one image or more, got {number}")
    for start in range(0, len(paths), number):
        yield list(paths[start : start + number])


def by_folder(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Yield groups of files that lie in one folder."""
    for _, group in groupby(sorted(paths, key=_in_folders), lambda path: path.parent):
        yield list(group)


class Asking:
    """How learners are asked about images: of one `task`, from 0, if that is told; or all `in_a_row`, as a stream.

    A share `reject` of known images may be taken for unknown. A stream goes on while the same learner is asked.
    """

    def __init__(self, *, task: int | None = None, reject: float = 0.0, in_a_row: bool = False):
        self._task, self._reject, self._in_a_row = task, reject, in_a_row
        self._stream: tuple[Learner, Stream] | None = None

    def of(self, learner: Learner) -> "Ask":
        """Return a function of images, and of the number of those that share a task, that returns what they are."""
        if not self._in_a_row:
            return partial(learner.predict, task=self._task, reject=self._reject)
        if self._stream is None or self._stream[0] is not learner:
            self._stream = learner, learner.stream()
        stream = self._stream[1]
        return lambda images, group_size: stream.predict(images, reject=self._reject)


def answers(
    learner: Learner, groups: Iterable[list[Path]], asking: Asking | None = None, *, workers: int = 8
) -> Iterator[Answer]:
    """Yield an answer for each file, in order; the files of a group are assumed to share a task."""
    size, ask = size_of(learner), (asking or Asking()).of(learner)
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[list[list[tuple[Path, Future]]]] = deque()
        for batch in _batches(groups):
            waiting.append([[(path, pool.submit(decode_image, path, size)) for path in group] for group in batch])
            if len(waiting) == 2:
                yield from _looked_at(ask, waiting.popleft())
        while waiting:
            yield from _looked_at(ask, waiting.popleft())


def size_of(learner: Learner) -> int:
    """Return the side in pixels of the images that a model was made for; refuse one of other than colour squares."""
    shape = learner.network.input_shape
    side = side_of(shape)
    if side is None:
        raise ValueError(f"the model was learned from images of shape {shape}; files give colour squares (3, n, n)")
    return side


def watch(
    current: Callable[[], Learner],
    folder: Path,
    asking: Asking | None = None,
    *,
    seen: Mapping[Path, State | None] | None = None,
    interval: float = 0.5,
    until: Callable[[], bool] = lambda: False,
) -> Iterator[Answer]:
    """Return an iterator of answers for images that are new in a folder from now on, once they have stopped growing.

    Or that are new since what was `seen`. `current` returns the learner to ask; it is called before each look at the
    folder. An image that cannot be read may be half written: it is tried again until it has not changed for some
    seconds. One that changes later is new again. Of several, the oldest is answered first.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder '{folder}' to watch")
    ask = partial(answers, asking=asking)
    return _watch(current, folder, ask, interval, until, dict(states_in(folder) if seen is None else seen))


def _watch(
    current: Callable[[], Learner],
    folder: Path,
    ask: Callable[[Learner, list[list[Path]]], Iterator[Answer]],
    interval: float,
    until: Callable[[], bool],
    handled: dict[Path, State | None],
) -> Iterator[Answer]:
    before: dict[Path, State | None] = {}
    is_there = True
    while not until():
        learner, now = current(), states_in(folder)
        if is_there != (is_there := folder.is_dir()):
            log.warning("the folder '%s' is %s", folder, "back" if is_there else "gone; it may come back")
        still = {path: state for path, state in now.items() if state and before.get(path) == state and _is_image(path)}
        in_order = sorted(still.items(), key=lambda item: item[1].changed)  # else as one counts
        ready = [[path] for path, state in in_order if handled.get(path) != state]
        for answer in ask(learner, ready):
            state = still[answer.path]
            if state_of(answer.path) != state:
                continue  # it changed while it was looked at, so what was seen may be a part
            if not answer.error or time.time() - state.changed > PATIENCE:
                handled[answer.path] = state
                yield answer
        before = now
        time.sleep(interval)


def _fitting(pattern: str) -> list[Path]:
    return sorted(map(Path, glob.glob(pattern, recursive=True)), key=in_counting_order)


def _in_folders(path: Path) -> tuple[object, ...]:
    return in_counting_order(path.parent), in_counting_order(path)


def _images_in(folder: Path) -> list[Path]:
    return [path for path in inside(folder) if _is_image(path)]


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and path.is_file()


def _batches(groups: Iterable[list[Path]]) -> Iterator[list[list[Path]]]:
    """Yield lists of groups that hold as many images as are looked at together, or one larger group."""
    batch: list[list[Path]] = []
    for group in groups:
        if batch and sum(map(len, batch)) + len(group) > TOGETHER:
            yield batch
            batch = []
        batch.append(group)
    if batch:
        yield batch


Ask = Callable[..., Prediction]


def _looked_at(ask: Ask, batch: list[list[tuple[Path, Future]]]) -> Iterator[Answer]:
    """Yield the answers for groups whose images are being decoded; groups of one size are looked at together."""
    read = [[(path, _result(future)) for path, future in group] for group in batch]
    good = [[(path, image) for path, image in group if not isinstance(image, ImageError)] for group in read]
    said: dict[Path, Answer] = {}
    for number in {len(group) for group in good} - {0}:
        said |= _said(ask, [pair for group in good if len(group) == number for pair in group], number)
    for path, image in chain.from_iterable(read):
        yield Answer(path, error=str(image)) if isinstance(image, ImageError) else said[path]


def _said(ask: Ask, images: list[tuple[Path, np.ndarray]], group_size: int) -> dict[Path, Answer]:
    found = ask(torch.from_numpy(np.stack([image for _, image in images])), group_size=group_size)
    names = [None if name is None else str(name) for name in found.classes]
    rows = zip(names, found.tasks.tolist(), found.share.tolist(), found.confidence.tolist(), strict=True)
    return {path: Answer(path, *row) for (path, _), row in zip(images, rows, strict=True)}


def _result(future: Future) -> np.ndarray | ImageError:
    try:
        return future.result()
    except ImageError as error:
        return error
