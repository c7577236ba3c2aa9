"""Folders of images: FOLDER/class name/*.jpg becomes one tensor of bytes, decoded once.

Images are decoded in parallel, straight to the size that training needs, and kept in a cache that is keyed by their
content, so a second run reads one file. What cannot be read is named.
"""

import hashlib
import logging
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from cps.data.decode import READER, ImageError, decode_image
from cps.storage import container as storage

log = logging.getLogger(__name__)

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
KNOWN = ", ".join(sorted(SUFFIXES))
MOST_NAMED = 20  # of the files that a message is about


@dataclass(frozen=True, repr=False)
class FolderImages:
    """The images of a folder, (N, 3, size, size) as bytes, the class and path of each, and what was skipped."""

    images: Tensor
    labels: list[str]
    paths: list[str]
    skipped: list[str]

    @property
    def classes(self) -> list[str]:
        """The names of the classes, sorted."""
        return sorted(set(self.labels))

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.images.shape))
        return f"FolderImages({shape}, classes {in_quotes(self.classes)}; {len(self.skipped)} skipped)"


class ImageFolder(Dataset):
    """The images of FOLDER/class name/*.jpg as a data set, whose images are decoded when a task asks for them.

    All images of a task are decoded at once, in parallel, to squares of `size` pixels: each is scaled so that its short
    side is `size` times 1 + `margin`, and cut at its middle. With a `cache`, a second run reads them from one file. A
    damaged image raises `ImageError` with its path, or is skipped and logged; where the images do not fit in memory,
    another of its class stands in for it. `watch` is called with the images done and in all. `files` names the images,
    where they are not all of the folder.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        size: int,
        margin: float = 0.0,
        files: Sequence[Path] | None = None,
        skip_damaged: bool = False,
        cache: str | Path | None = None,
        workers: int = 8,
        watch: Callable[[int, int], None] | None = None,
    ):
        self.folder, self.size, self.margin = Path(folder), size, margin
        self.skip_damaged, self.workers, self.watch = skip_damaged, workers, watch
        self.cache = None if cache is None else Path(cache)
        self.files = list_images(folder) if files is None else list(files)
        self.bytes_each = 3 * size * size

    @property
    def targets(self) -> list[str]:
        """The class of each image."""
        return [path.parent.name for path in self.files]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, str]:
        name = self.files[index].parent.name
        for path in (self.files[index], *self._alike(index)):
            try:
                return torch.from_numpy(decode_image(path, self.size, self.margin)), name
            except ImageError as error:
                if not self.skip_damaged:
                    raise
                log.warning("skipped: %s", error)
        raise ImageError(f"class {name!r} has no image that can be read")

    def _alike(self, index: int) -> Iterator[Path]:
        """Yield the other images of the same class, which stand in for one that is skipped."""
        for path in self.files:
            if path.parent == self.files[index].parent and path != self.files[index]:
                yield path

    def keep(self, classes: Container[str]) -> None:
        """Leave out the images of all other classes."""
        self.files = [path for path in self.files if path.parent.name in classes]

    def read(self, indices: Sequence[int] | None = None) -> FolderImages:
        """Return the images of these indices, or all, from the cache if they are there."""
        files = self.files if indices is None else [self.files[index] for index in indices]
        kept = None if self.cache is None else self.cache / f"{self._key(files)}.safetensors"
        if kept is not None and kept.exists():
            try:
                return _from_cache(kept)
            except storage.FileError:
                kept.unlink()
        read = self._decode(files)
        if kept is not None and not read.skipped:
            header = {"labels": read.labels, "paths": read.paths}
            try:
                storage.write(kept, "images", header, {"images": read.images})
            except OSError as error:
                log.warning("images are not kept for the next time: %s", error)
        return read

    def _decode(self, files: list[Path]) -> FolderImages:
        """Return the images that can be read, and what is wrong with the others."""

        def decode(path: Path) -> np.ndarray | str:
            try:
                return decode_image(path, self.size, self.margin)
            except ImageError as error:
                return str(error)

        images = torch.empty(len(files), 3, self.size, self.size, dtype=torch.uint8)
        good, skipped = [], []
        with ThreadPoolExecutor(max(1, self.workers)) as pool:
            for done, (path, result) in enumerate(zip(files, pool.map(decode, files), strict=True), start=1):
                if isinstance(result, str):
                    skipped.append(result)
                else:
                    images[len(good)] = torch.from_numpy(result)
                    good.append(path)
                if self.watch is not None:
                    self.watch(done, len(files))
        if not good:
            raise ImageError(f"none of the {len(files)} images in '{self.folder}' can be read; the first: {skipped[0]}")
        if skipped and not self.skip_damaged:
            more = f"\n... and {len(skipped) - MOST_NAMED} more" if len(skipped) > MOST_NAMED else ""
            raise ImageError("\n".join(skipped[:MOST_NAMED]) + more)
        paths = [str(path.relative_to(self.folder)) for path in good]
        return FolderImages(images[: len(good)], [path.parent.name for path in good], paths, skipped)

    def _key(self, files: list[Path]) -> str:
        """Return a digest of the content of files, and of how they are decoded."""

        def digest(path: Path) -> str:
            return f"{path.relative_to(self.folder)} {file_digest(path)}"

        with ThreadPoolExecutor(max(1, self.workers)) as pool:
            lines = list(pool.map(digest, files))
        how = f"reader {READER}, size {self.size}, margin {self.margin}"
        return hashlib.sha256("\n".join([how, *lines]).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_folder(folder: str | Path, *, size: int, **settings: Any) -> FolderImages:
    """Decode all images of a folder; the settings are those of `ImageFolder`."""
    return ImageFolder(folder, size=size, **settings).read()


def list_images(folder: str | Path, *, skip_empty: bool = False) -> list[Path]:
    """Return the images in the folders of all classes, sorted; refuse a class that has none, or skip it."""
    folder = Path(folder)
    if not folder.exists():
        raise FileNotFoundError(f"there is no folder '{folder}'")
    if not folder.is_dir():
        raise FileNotFoundError(f"'{folder}' is a file; a folder is needed, with a folder of images for each class")
    classes = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not classes:
        raise ValueError(f"'{folder}' has no folders in it; put the images of each class in a folder of that name")
    files = {
        each: sorted(path for path in each.iterdir() if path.suffix.lower() in SUFFIXES and is_plain_file(path))
        for each in classes
    }
    empty = [each for each, found in files.items() if not found]
    if empty and (not skip_empty or len(empty) == len(classes)):
        deeper = " itself, only folders in it" if all(any(p.is_dir() for p in each.iterdir()) for each in empty) else ""
        named = in_quotes([each.name for each in empty])
        what = f"folder of class {named} holds" if len(empty) == 1 else f"folders of classes {named} hold"
        raise ValueError(f"the {what} no image{deeper}; known are {KNOWN}")
    return [path for found in files.values() for path in found]


def in_quotes(names: Sequence[object]) -> str:
    """Return names in quotes, in a row; of many, only the first."""
    return ", ".join(f"'{name}'" for name in names[:MOST_NAMED]) + (", ..." if len(names) > MOST_NAMED else "")


def is_plain_file(path: Path) -> bool:
    """Say whether a path is a file to read, and neither hidden nor a link to nothing, a folder or a pipe."""
    return path.is_file() and not path.name.startswith(".")


def _from_cache(path: Path) -> FolderImages:
    header, tensors = storage.read(path, "images")
    return FolderImages(tensors["images"], header["labels"], header["paths"], [])
