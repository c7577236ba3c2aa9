"""A folder of images for learning on frozen features: features are kept, and images only while they are decoded.

So memory stays bounded however many images there are: 5 KiB an image instead of 147 KiB.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from cps.closed_form.spaces import Pretrained, Space
from cps.data.decode import ImageError, ImageFormat
from cps.data.examples import ClassName
from cps.data.image_folder import check_damage
from cps.network.shared import SharedNetwork

BATCH = 64  # images that are decoded ahead, and whose features are computed together


@dataclass(frozen=True, repr=False)
class FrozenFolder(Dataset):
    """Images of a folder with their features in the space `Pretrained`; an image is decoded again when it is read.

    `labels` is the class of each image, `paths` its path in the folder, and `skipped` has the errors of damaged ones.
    `seconds` is the time that all this took.
    """

    folder: Path
    format: ImageFormat
    paths: list[str]
    labels: list[Any]
    known: Tensor
    skipped: list[str]
    seconds: float

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, ClassName]:
        return torch.from_numpy(self.format.decode(self.folder / self.paths[index])), self.labels[index]

    @property
    def targets(self) -> list[ClassName]:
        """The class of each image."""
        return self.labels

    def known_features(self, space: Space | None) -> Tensor | None:
        """Return the features of all images in a space, or None if they are not known."""
        return self.known if space == Pretrained() else None

    def select(self, indices: Sequence[int], names: Mapping[str, ClassName]) -> "FrozenFolder":
        """Return some of the images; `names` maps their labels to new ones."""
        paths, labels = [self.paths[index] for index in indices], [names[self.labels[index]] for index in indices]
        known = self.known[torch.tensor(indices, dtype=torch.long, device=self.known.device)]
        return replace(self, paths=paths, labels=labels, known=known)


def read_features(
    network: SharedNetwork,
    folder: Path,
    files: Sequence[Path],
    image_format: ImageFormat,
    *,
    skip_damaged: bool = False,
    workers: int = 8,
    on_progress: Callable[[int, int], None] | None = None,
) -> FrozenFolder:
    """Decode all files, a few at a time, and keep their features. Raise `ImageError` as `ImageFolder.read` does."""
    paths, skipped, found = [], [], []
    done, start = 0, time.monotonic()
    for batch in _decoded(files, image_format, workers):
        readable = [(path, image) for path, image in batch if not isinstance(image, str)]
        skipped += [image for _, image in batch if isinstance(image, str)]
        paths += [path for path, _ in readable]
        is_wanted = skip_damaged or not skipped  # otherwise only the other damaged files are still to be found
        if readable and is_wanted:
            images = torch.from_numpy(np.stack([image for _, image in readable]))
            found.append(network.features([images], Pretrained()))
        done += len(batch)
        if on_progress is not None:
            on_progress(done, len(files))
    check_damage(folder, len(files), skipped, is_skipped=skip_damaged)
    names = [str(path.relative_to(folder)) for path in paths]
    labels, seconds = [path.parent.name for path in paths], time.monotonic() - start
    return FrozenFolder(folder, image_format, names, labels, torch.cat(found), skipped, seconds)


def _decoded(
    files: Sequence[Path], image_format: ImageFormat, workers: int
) -> Iterator[list[tuple[Path, np.ndarray | str]]]:
    """Yield batches of files with their pixels, or why they cannot be read; the next batch is decoded meanwhile."""

    def decode(path: Path) -> np.ndarray | str:
        try:
            return image_format.decode(path)
        except ImageError as error:
            return str(error)

    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[list[tuple[Path, Future[np.ndarray | str]]]] = deque()
        for start in range(0, len(files), BATCH):
            waiting.append([(path, pool.submit(decode, path)) for path in files[start : start + BATCH]])
            if len(waiting) == 2:
                yield [(path, future.result()) for path, future in waiting.popleft()]
        for batch in waiting:
            yield [(path, future.result()) for path, future in batch]
