"""Predict the classes of image files.

Images are decoded in parallel while the model predicts the ones before them, so a long list needs little memory.
"""

import glob
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cps.app.list_files import list_files, natural_order
from cps.data.decode import ImageError, ImageFormat
from cps.data.image_folder import SUFFIX_LIST, SUFFIXES
from cps.data.images import square_size
from cps.learner import Learner
from cps.selection.prediction import Prediction
from cps.selection.stream import Stream

BATCH = 256  # images predicted together, unless a group is larger


@dataclass(frozen=True)
class FilePrediction:
    """The prediction for an image file: class, task (from 0), the task's share and the class's confidence.

    `label` is None for an unknown image; `task` is then the most similar one. `version` counts the tasks, up to this
    one, that have learned the class: 1 unless it was trained again. If the file cannot be read, `error` says why and
    the other fields are None.
    """

    path: Path
    label: str | None = None
    task: int | None = None
    share: float | None = None
    confidence: float | None = None
    error: str = ""
    version: int | None = None


class Predictor:
    """How images are predicted: with a given `task` (from 0), as a `stream`, or each group by itself.

    `reject` is the share of known images that may be called unknown. A stream continues over several calls as long as
    the learner is the same object.
    """

    def __init__(self, *, task: int | None = None, reject: float = 0.0, stream: bool = False):
        self._task, self._reject, self._is_stream = task, reject, stream
        self._stream: tuple[Learner, Stream] | None = None

    def predict(self, learner: Learner, images: Tensor, group_size: int) -> Prediction:
        """Predict images; every `group_size` consecutive ones share a task, except in a stream."""
        if not self._is_stream:
            return learner.predict(images, task=self._task, reject=self._reject, group_size=group_size)
        if self._stream is None or self._stream[0] is not learner:
            self._stream = learner, learner.stream()
        return self._stream[1].predict(images, reject=self._reject)


def find_images(places: Iterable[str | Path]) -> list[Path]:
    """Return the images given by files, folders (including subfolders) and patterns such as *.jpg, in order.

    A file that is given by its name is included whatever its suffix, even if it does not exist: its prediction will
    then be an error. A file that is given twice is included once.
    """
    found: dict[str, Path] = {}  # by absolute path
    missing = []
    for place in places:
        path = Path(place)
        paths = [path] if path.exists() else _match(str(place))
        missing += [] if paths else [path]
        for one in paths or [path]:
            for image in _images_in(one) if one.is_dir() else [one]:
                found.setdefault(os.path.abspath(image), image)
    if missing and len(missing) == len(found):
        raise FileNotFoundError(f"no file or folder '{missing[0]}', and no file matches it as a pattern")
    if not found:
        given = ", ".join(f"'{place}'" for place in places)
        raise FileNotFoundError(f"no image in {given}; supported are {SUFFIX_LIST}")
    return list(found.values())


def find_other_files(places: Iterable[str | Path]) -> list[Path]:
    """Return the files in the given folders and their subfolders that are not images, without hidden ones."""
    folders = [Path(place) for place in places if Path(place).is_dir()]
    return [path for folder in folders for path in list_files(folder) if not path.is_dir() and not is_image(path)]


def is_image(path: Path) -> bool:
    """Return True for a file with the suffix of an image."""
    return path.suffix.lower() in SUFFIXES and path.is_file()


def group_by_size(paths: Sequence[Path], size: int) -> Iterator[list[Path]]:
    """Yield groups of `size` consecutive files; the last group may be smaller."""
    if size < 1:
        raise ValueError(f"the group size must be at least 1, got {size}")
    for start in range(0, len(paths), size):
        yield list(paths[start : start + size])


def group_by_folder(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Yield the files of each folder as a group."""
    for _, group in groupby(sorted(paths, key=_folder_order), lambda path: path.parent):
        yield list(group)


def predict_files(
    learner: Learner, groups: Iterable[list[Path]], predictor: Predictor | None = None, *, workers: int = 8
) -> Iterator[FilePrediction]:
    """Yield a prediction for each file, in order. The files of a group are assumed to share a task."""
    image_format, predictor = image_format_of(learner), predictor or Predictor()
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[list[list[tuple[Path, Future]]]] = deque()
        for batch in _batches(groups):
            waiting.append([[(path, pool.submit(image_format.decode, path)) for path in group] for group in batch])
            if len(waiting) == 2:
                yield from _predict_batch(learner, predictor, waiting.popleft())
        while waiting:
            yield from _predict_batch(learner, predictor, waiting.popleft())


def image_format_of(learner: Learner) -> ImageFormat:
    """Return how files become images of a model; raise `ValueError` unless these are colour squares."""
    shape = learner.network.input_shape
    side = square_size(shape)
    if side is None:
        raise ValueError(f"image files need a model of images (3, n, n); this model was learned from images {shape}")
    return ImageFormat(side, 0.0 if learner.architecture is None else learner.architecture.margin)


def _match(pattern: str) -> list[Path]:
    return sorted(map(Path, glob.glob(pattern, recursive=True)), key=natural_order)


def _folder_order(path: Path) -> tuple[object, ...]:
    return natural_order(path.parent), natural_order(path)


def _images_in(folder: Path) -> list[Path]:
    return [path for path in list_files(folder) if is_image(path)]


def _batches(groups: Iterable[list[Path]]) -> Iterator[list[list[Path]]]:
    """Yield lists of groups with at most `BATCH` images together, or a single larger group."""
    batch: list[list[Path]] = []
    for group in groups:
        if batch and sum(map(len, batch)) + len(group) > BATCH:
            yield batch
            batch = []
        batch.append(group)
    if batch:
        yield batch


def _predict_batch(
    learner: Learner, predictor: Predictor, batch: list[list[tuple[Path, Future]]]
) -> Iterator[FilePrediction]:
    """Yield predictions for groups of images that are being decoded; groups of equal size are predicted together."""
    decoded = [[(path, _result(future)) for path, future in group] for group in batch]
    readable = [[(path, image) for path, image in group if not isinstance(image, ImageError)] for group in decoded]
    predictions: dict[Path, FilePrediction] = {}
    for size in {len(group) for group in readable} - {0}:
        images = [pair for group in readable if len(group) == size for pair in group]
        predictions |= _predict_images(learner, predictor, images, size)
    for path, image in chain.from_iterable(decoded):
        yield FilePrediction(path, error=str(image)) if isinstance(image, ImageError) else predictions[path]


def _predict_images(
    learner: Learner, predictor: Predictor, images: list[tuple[Path, np.ndarray]], group_size: int
) -> dict[Path, FilePrediction]:
    found = predictor.predict(learner, torch.from_numpy(np.stack([image for _, image in images])), group_size)
    names = [None if name is None else str(name) for name in found.classes]
    tasks = found.tasks.tolist()
    rows = zip(names, tasks, found.share.tolist(), found.confidence.tolist(), strict=True)
    versions = [learner.network.version(task, name) for task, name in zip(tasks, found.classes, strict=True)]
    return {
        path: FilePrediction(path, *row, version=version)
        for (path, _), row, version in zip(images, rows, versions, strict=True)
    }


def _result(future: Future) -> np.ndarray | ImageError:
    try:
        return future.result()
    except ImageError as error:
        return error
