"""A shipment: a folder of images of new classes, looked at before anything is learned from it."""

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
from cps.data.image_folder import SUFFIXES, file_digest, in_quotes, list_images

FEW = 20  # images of a class, below which a warning is due
ENOUGH = 5  # images of a class, from which some can be held out
SAMPLE = 200  # images that are looked at closely
GREY = 4  # levels by which the channels of a grey image may differ; JPEG rounds
THUMBNAIL = 32  # pixels

Watch = Callable[[str, int, int, str], None]  # what is done, how much of it, of how much, and a note


class Sample(NamedTuple):
    """What some of the images look like: the middle short side, whether all are grey, mean and deviation by channel."""

    side: int
    is_grey: bool
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


@dataclass(frozen=True)
class FolderScan:
    """The images of a folder by class, the digest of each file, and what a sample of them looks like."""

    folder: Path
    files: tuple[Path, ...]
    digests: tuple[str, ...]
    sample: Sample

    @property
    def labels(self) -> list[str]:
        """The class of each image: the name of its folder."""
        return [path.parent.name for path in self.files]

    @property
    def paths(self) -> list[str]:
        """Where each image lies in the folder."""
        return [str(file.relative_to(self.folder)) for file in self.files]

    @cached_property
    def counts(self) -> dict[str, int]:
        """How many images each class has, classes sorted."""
        return dict(sorted(Counter(self.labels).items()))

    @property
    def digest(self) -> str:
        """One digest of all images and their classes, whatever the files are called."""
        lines = sorted(f"{label} {digest}" for label, digest in zip(self.labels, self.digests, strict=True))
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def held_out(self, share: float) -> set[int]:
        """Return the images to hold out: about that share of each class that has enough, by the order of digests.

        Copies of one image have one digest, so they are held out together, and the accuracy on them stays honest.
        """
        chosen: set[int] = set()
        for _, members in groupby(range(len(self.files)), lambda index: self.files[index].parent.name):
            places = list(members)
            wanted = max(1, round(share * len(places))) if len(places) >= ENOUGH and share > 0 else 0
            different = sorted({self.digests[place] for place in places})
            held = set(different[: min(wanted, len(different) - 1)])
            chosen.update(place for place in places if self.digests[place] in held)
        return chosen

    def only(self, paths: Container[str]) -> "FolderScan":
        """Return a shipment of some of its files alone, which are named as they lie in its folder."""
        named = [path in paths for path in self.paths]
        files, digests = (tuple(compress(kept, named)) for kept in (self.files, self.digests))
        return replace(self, files=files, digests=digests)

    def warnings(self) -> list[str]:
        """Return what the user should know: files left out, classes of few images, images that lie in two classes."""
        few = {name: number for name, number in self.counts.items() if number < FEW}
        found = [f"class '{name}' has only {number} image(s); {FEW} or more are better" for name, number in few.items()]
        return [*self._empty(), *self._overlooked(), *found, *self._twins()]

    def _empty(self) -> Iterator[str]:
        """Yield a warning for each folder of a class without images, which is skipped."""
        for path in sorted(self.folder.iterdir()):
            if path.is_dir() and not path.name.startswith(".") and path.name not in self.counts:
                yield f"the folder of class '{path.name}' holds no image; it is left out"

    def _overlooked(self) -> Iterator[str]:
        """Yield a warning if there are files that are not images, or not right in the folder of a class."""
        taken = set(self.files)
        others = [path for path in sorted(self.folder.rglob("*")) if path not in taken and not path.is_dir()]
        others += [
            path for path in sorted(self.folder.glob("*/*")) if path.is_dir() and path.suffix.lower() in SUFFIXES
        ]
        names = [str(p.relative_to(self.folder)) for p in others if not p.name.startswith(".")]
        if names:
            why = "they are no images, or not right in the folder of a class"
            yield f"{len(names)} file(s) are left out, since {why}: {in_quotes(names)}"

    def _twins(self) -> Iterator[str]:
        """Yield a warning for each pair of classes that share an image, byte for byte."""
        homes: dict[str, dict[str, Path]] = {}
        for path, digest in zip(self.files, self.digests, strict=True):
            homes.setdefault(digest, {}).setdefault(path.parent.name, path)
        pairs: dict[tuple[str, str], list[Path]] = {}
        for places in homes.values():
            first, *others = sorted(places)
            for other in others:
                pairs.setdefault((first, other), []).append(places[other])
        for (first, other), paths in sorted(pairs.items()):
            yield (
                f"classes '{first}' and '{other}' share {len(paths)} identical image(s), such as "
                f"'{paths[0].relative_to(self.folder)}'; an image should be in one class"
            )


def look(folder: str | Path, *, skip_empty: bool = False, workers: int = 8, watch: Watch | None = None) -> FolderScan:
    """Look at a folder of images: list and digest all of them, and look closely at some."""
    files = list_images(folder, skip_empty=skip_empty)
    _check_names({path.parent.name for path in files})
    digests = []
    with ThreadPoolExecutor(workers) as pool:
        for digest in pool.map(file_digest, files):
            digests.append(digest)
            if watch is not None:
                watch("looking at images", len(digests), len(files), "")
        seen = [one for one in pool.map(_glance, files[:: -(-len(files) // SAMPLE)]) if one is not None]
    if not seen:
        raise ImageError(f"none of the images looked at in '{folder}' can be read; the first is '{files[0]}'")
    pixels = np.stack([thumbnail for _, thumbnail in seen]) / 255  # (images, 3, height, width)
    grey = sum(bool(np.ptp(thumbnail.astype(int), axis=0).max() <= GREY) for _, thumbnail in seen)
    mean, std = pixels.mean(axis=(0, 2, 3)), pixels.std(axis=(0, 2, 3)).clip(0.05)
    sample = Sample(int(median(side for side, _ in seen)), grey == len(seen), _rounded(mean), _rounded(std))
    return FolderScan(Path(folder), tuple(files), tuple(digests), sample)


def _check_names(classes: Iterable[str]) -> None:
    """Refuse names of folders that are no text, which no model file could hold."""
    for name in classes:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ValueError(f"the name of the folder {name!r} is not UTF-8 text; rename it, then learn it") from None


def _glance(path: Path) -> tuple[int, np.ndarray] | None:
    """Return the short side of an image and a thumbnail; None for one that cannot be read, which decoding will name."""
    try:
        with Image.open(path, formats=FORMATS) as opened:
            side = min(opened.size)
        return side, decode_image(path, THUMBNAIL)
    except Exception:  # decoders raise whatever they like
        return None


def _rounded(values: np.ndarray) -> tuple[float, float, float]:
    red, green, blue = (round(float(value), 3) for value in values)
    return red, green, blue
