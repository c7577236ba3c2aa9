"""Scan a folder of images before learning it: count, hash and sample the images, and find likely mistakes."""

import hashlib
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress, groupby
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
from PIL import Image

from cps.data.decode import FORMATS, ImageError, decode_image
from cps.data.image_folder import SUFFIXES, file_digest, list_images
from cps.runtime.text import quote_names

FEW_IMAGES = 20  # a class with fewer images gets a warning
MIN_TO_HOLD_OUT = 5  # images a class must have before any of them is held out
SAMPLE_SIZE = 200  # images that are decoded for the sample
GREY_TOLERANCE = 4  # levels by which the channels of a grey image may differ, since JPEG rounds
THUMBNAIL = 32  # pixels

OnProgress = Callable[[str, int, int, str], None]  # (what is being done, done, total, note)


class ImageSample(NamedTuple):
    """Statistics of a sample of the images: median short side, whether all are grey, mean and deviation by channel."""

    side: int
    is_grey: bool
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


@dataclass(frozen=True)
class FolderScan:
    """The image files of a folder, the digest of each, and statistics of a sample of them."""

    folder: Path
    files: tuple[Path, ...]
    digests: tuple[str, ...]
    sample: ImageSample

    @property
    def labels(self) -> list[str]:
        """The class of each image: the name of its folder."""
        return [path.parent.name for path in self.files]

    @property
    def paths(self) -> list[str]:
        """The path of each image, relative to the folder."""
        return [str(file.relative_to(self.folder)) for file in self.files]

    @cached_property
    def counts(self) -> dict[str, int]:
        """The number of images of each class, sorted by class."""
        return dict(sorted(Counter(self.labels).items()))

    @property
    def digest(self) -> str:
        """A digest of all images and their classes. It does not depend on the names of the files."""
        lines = sorted(f"{label} {digest}" for label, digest in zip(self.labels, self.digests, strict=True))
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def held_out(self, share: float) -> set[int]:
        """Return the indices of the images to hold out: about `share` of each class with enough images.

        The digests decide which. Copies of an image have the same digest, so they are held out together, and the
        accuracy on held-out images is not inflated by copies in the training images.
        """
        chosen: set[int] = set()
        for _, members in groupby(range(len(self.files)), lambda index: self.files[index].parent.name):
            indices = list(members)
            wanted = max(1, round(share * len(indices))) if len(indices) >= MIN_TO_HOLD_OUT and share > 0 else 0
            distinct = sorted({self.digests[index] for index in indices})
            held = set(distinct[: min(wanted, len(distinct) - 1)])
            chosen.update(index for index in indices if self.digests[index] in held)
        return chosen

    def subset(self, paths: Container[str]) -> "FolderScan":
        """Return the scan of some of the files, given by their paths relative to the folder."""
        is_kept = [path in paths for path in self.paths]
        files, digests = (tuple(compress(values, is_kept)) for values in (self.files, self.digests))
        return replace(self, files=files, digests=digests)

    def warnings(self, *, known: Container[str] = ()) -> list[str]:
        """Return warnings about skipped folders and files, small classes, and images that are in two classes.

        Classes whose folders are `known` have more images than those of this folder.
        """
        small = {name: count for name, count in self.counts.items() if count < FEW_IMAGES and name not in known}
        found = [
            f"class '{name}' has only {count} image(s); at least {FEW_IMAGES} are recommended"
            for name, count in small.items()
        ]
        return [*self._empty_folders(), *self._skipped_files(), *found, *self._shared_images()]

    def _empty_folders(self) -> Iterator[str]:
        """Yield a warning for each class folder without images."""
        for path in sorted(self.folder.iterdir()):
            if path.is_dir() and not path.name.startswith(".") and path.name not in self.counts:
                yield f"the folder of class '{path.name}' contains no images; it is skipped"

    def _skipped_files(self) -> Iterator[str]:
        """Yield a warning if there are files that are not images, or not directly in a class folder."""
        taken = set(self.files)
        others = [path for path in sorted(self.folder.rglob("*")) if path not in taken and not path.is_dir()]
        others += [
            path for path in sorted(self.folder.glob("*/*")) if path.is_dir() and path.suffix.lower() in SUFFIXES
        ]
        names = [str(p.relative_to(self.folder)) for p in others if not p.name.startswith(".")]
        if names:
            reason = "not an image, or not directly in a class folder"
            yield f"{len(names)} file(s) are skipped ({reason}): {quote_names(names)}"

    def _shared_images(self) -> Iterator[str]:
        """Yield a warning for each pair of classes that have identical image files."""
        by_digest: dict[str, dict[str, Path]] = {}
        for path, digest in zip(self.files, self.digests, strict=True):
            by_digest.setdefault(digest, {}).setdefault(path.parent.name, path)
        pairs: dict[tuple[str, str], list[Path]] = {}
        for by_class in by_digest.values():
            first, *others = sorted(by_class)
            for other in others:
                pairs.setdefault((first, other), []).append(by_class[other])
        for (first, other), paths in sorted(pairs.items()):
            yield (
                f"classes '{first}' and '{other}' share {len(paths)} identical image(s), for example "
                f"'{paths[0].relative_to(self.folder)}'; an image should be in only one class"
            )


def scan_folder(
    folder: str | Path, *, skip_empty: bool = False, workers: int = 8, on_progress: OnProgress | None = None
) -> FolderScan:
    """List and hash all images of a folder, and decode a sample of them."""
    files = list_images(folder, skip_empty=skip_empty)
    _check_class_names({path.parent.name for path in files})
    digests = []
    with ThreadPoolExecutor(workers) as pool:
        for digest in pool.map(file_digest, files):
            digests.append(digest)
            if on_progress is not None:
                on_progress("scanning images", len(digests), len(files), "")
        thumbnails = [
            found for found in pool.map(_thumbnail, files[:: -(-len(files) // SAMPLE_SIZE)]) if found is not None
        ]
    if not thumbnails:
        raise ImageError(f"none of the sampled images in '{folder}' can be read; the first is '{files[0]}'")
    return FolderScan(Path(folder), tuple(files), tuple(digests), _measure(thumbnails))


def _check_class_names(names: Iterable[str]) -> None:
    """Raise `ValueError` for a folder name that is not valid text, since a model file could not store it."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ValueError(f"the folder name {name!r} is not UTF-8 text; rename the folder") from None


def _thumbnail(path: Path) -> tuple[int, np.ndarray] | None:
    """Return the short side and a thumbnail of an image; None if it cannot be read, which decoding will report."""
    try:
        with Image.open(path, formats=FORMATS) as opened:
            side = min(opened.size)
        return side, decode_image(path, THUMBNAIL)
    except Exception:  # image decoders may raise anything
        return None


def _measure(thumbnails: list[tuple[int, np.ndarray]]) -> ImageSample:
    """Return the statistics of the sampled images, given the short side and the thumbnail of each."""
    pixels = np.stack([thumbnail for _, thumbnail in thumbnails]) / 255  # (images, 3, height, width)
    grey = sum(bool(np.ptp(thumbnail.astype(int), axis=0).max() <= GREY_TOLERANCE) for _, thumbnail in thumbnails)
    mean, std = pixels.mean(axis=(0, 2, 3)), pixels.std(axis=(0, 2, 3)).clip(0.05)
    side = int(median(side for side, _ in thumbnails))
    return ImageSample(side, grey == len(thumbnails), _rounded(mean), _rounded(std))


def _rounded(values: np.ndarray) -> tuple[float, float, float]:
    red, green, blue = (round(float(value), 3) for value in values)
    return red, green, blue
