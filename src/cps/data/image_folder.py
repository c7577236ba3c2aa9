"""Image folders: FOLDER/CLASS/*.jpg becomes one tensor of bytes.

Images are decoded in parallel, directly to the size that training needs, and stored in a cache keyed by their content,
so that a second run reads one file. Errors name the unreadable files.
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

from cps.data.decode import DECODER_VERSION, ImageError, decode_image
from cps.runtime.text import quote_names
from cps.storage import container

log = logging.getLogger(__name__)

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
SUFFIX_LIST = ", ".join(sorted(SUFFIXES))  # for messages
MAX_ERRORS = 20  # unreadable files named in one message


@dataclass(frozen=True, repr=False)
class FolderImages:
    """The images of a folder, bytes (N, 3, size, size), with the class and path of each and the errors skipped."""

    images: Tensor
    labels: list[str]
    paths: list[str]
    skipped: list[str]

    @property
    def classes(self) -> list[str]:
        """The class names, sorted."""
        return sorted(set(self.labels))

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.images.shape))
        return f"FolderImages({shape}, classes {quote_names(self.classes)}; {len(self.skipped)} skipped)"


class ImageFolder(Dataset):
    """The images in FOLDER/CLASS/*.jpg as a data set that decodes images when a task is learned.

    All images of a task are decoded in parallel to squares of `size` pixels: the short side is scaled to
    `size * (1 + margin)`, and the centre is cropped. `files` selects images of the folder; the default is all. With a
    `cache` folder, a second run reads the decoded images from one file. `on_progress` is called with the number of
    images done and the total.

    A damaged image raises `ImageError` with its path, or is skipped and logged if `skip_damaged`. If the images do not
    fit in memory, another image of the same class replaces a skipped one.
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
        on_progress: Callable[[int, int], None] | None = None,
    ):
        self.folder, self.size, self.margin = Path(folder), size, margin
        self.skip_damaged, self.workers, self.on_progress = skip_damaged, workers, on_progress
        self.cache = None if cache is None else Path(cache)
        self.files = list_images(folder) if files is None else list(files)
        self.bytes_per_image = 3 * size * size

    @property
    def targets(self) -> list[str]:
        """The class of each image."""
        return [path.parent.name for path in self.files]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, str]:
        name = self.files[index].parent.name
        for path in (self.files[index], *self._others_of_class(index)):
            try:
                return torch.from_numpy(decode_image(path, self.size, self.margin)), name
            except ImageError as error:
                if not self.skip_damaged:
                    raise
                log.warning("skipped: %s", error)
        raise ImageError(f"class {name!r} has no readable image")

    def _others_of_class(self, index: int) -> Iterator[Path]:
        """Yield the other images of the same class, which replace a skipped one."""
        for path in self.files:
            if path.parent == self.files[index].parent and path != self.files[index]:
                yield path

    def keep(self, classes: Container[str]) -> None:
        """Drop the images of all other classes."""
        self.files = [path for path in self.files if path.parent.name in classes]

    def read(self, indices: Sequence[int] | None = None) -> FolderImages:
        """Return the images at these indices, or all, from the cache if they are in it."""
        files = self.files if indices is None else [self.files[index] for index in indices]
        cached = None if self.cache is None else self.cache / f"{self._cache_key(files)}.safetensors"
        if cached is not None and cached.exists():
            try:
                return _read_cached(cached)
            except container.FileError:
                cached.unlink()
        read = self._decode(files)
        if cached is not None and not read.skipped:
            header = {"labels": read.labels, "paths": read.paths}
            try:
                container.write(cached, "images", header, {"images": read.images})
            except OSError as error:
                log.warning("decoded images are not cached: %s", error)
        return read

    def _decode(self, files: list[Path]) -> FolderImages:
        """Return the readable images; skip the others, or raise `ImageError` with the first of them."""

        def decode(path: Path) -> np.ndarray | str:
            try:
                return decode_image(path, self.size, self.margin)
            except ImageError as error:
                return str(error)

        images = torch.empty(len(files), 3, self.size, self.size, dtype=torch.uint8)
        readable, skipped = [], []
        with ThreadPoolExecutor(max(1, self.workers)) as pool:
            for done, (path, result) in enumerate(zip(files, pool.map(decode, files), strict=True), start=1):
                if isinstance(result, str):
                    skipped.append(result)
                else:
                    images[len(readable)] = torch.from_numpy(result)
                    readable.append(path)
                if self.on_progress is not None:
                    self.on_progress(done, len(files))
        check_damage(self.folder, len(files), skipped, is_skipped=self.skip_damaged)
        paths = [str(path.relative_to(self.folder)) for path in readable]
        return FolderImages(images[: len(readable)], [path.parent.name for path in readable], paths, skipped)

    def _cache_key(self, files: list[Path]) -> str:
        """Return a digest of the files' content and of the settings they are decoded with."""

        def digest(path: Path) -> str:
            return f"{path.relative_to(self.folder)} {file_digest(path)}"

        with ThreadPoolExecutor(max(1, self.workers)) as pool:
            lines = list(pool.map(digest, files))
        settings = f"reader {DECODER_VERSION}, size {self.size}, margin {self.margin}"
        return hashlib.sha256("\n".join([settings, *lines]).encode()).hexdigest()


def check_damage(folder: Path, files: int, damaged: Sequence[str], *, is_skipped: bool) -> None:
    """Raise `ImageError` if all images of a folder are damaged, or if some are and these are not skipped."""
    if len(damaged) == files:
        raise ImageError(f"none of the {files} images in '{folder}' can be read; the first: {damaged[0]}")
    if damaged and not is_skipped:
        more = f"\n... and {len(damaged) - MAX_ERRORS} more" if len(damaged) > MAX_ERRORS else ""
        raise ImageError("\n".join(damaged[:MAX_ERRORS]) + more)


def _read_cached(path: Path) -> FolderImages:
    header, tensors = container.read(path, "images")
    return FolderImages(tensors["images"], header["labels"], header["paths"], [])


def read_folder(folder: str | Path, *, size: int, **settings: Any) -> FolderImages:
    """Decode all images of a folder; `settings` are those of `ImageFolder`."""
    return ImageFolder(folder, size=size, **settings).read()


def list_images(folder: str | Path, *, skip_empty: bool = False) -> list[Path]:
    """Return the images in the folders of all classes, sorted.

    Raise `ValueError` if a class has no image; with `skip_empty`, only if no class has one.
    """
    folder = Path(folder)
    if not folder.exists():
        raise FileNotFoundError(f"there is no folder '{folder}'")
    if not folder.is_dir():
        raise FileNotFoundError(f"'{folder}' is a file; a folder is needed, with a folder of images for each class")
    classes = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not classes:
        raise ValueError(f"'{folder}' has no folders in it; put the images of each class in a folder with its name")
    files = {
        each: sorted(path for path in each.iterdir() if path.suffix.lower() in SUFFIXES and _is_visible_file(path))
        for each in classes
    }
    empty = [each for each, found in files.items() if not found]
    if empty and (not skip_empty or len(empty) == len(classes)):
        has_folders = all(any(path.is_dir() for path in each.iterdir()) for each in empty)
        deeper = " itself, only folders in it" if has_folders else ""
        named = quote_names([each.name for each in empty])
        what = f"folder of class {named} holds" if len(empty) == 1 else f"folders of classes {named} hold"
        raise ValueError(f"the {what} no image{deeper}; supported are {SUFFIX_LIST}")
    return [path for found in files.values() for path in found]


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_visible_file(path: Path) -> bool:
    """Return True for a file that is not hidden; links to nothing, folders and pipes are not files."""
    return path.is_file() and not path.name.startswith(".")
