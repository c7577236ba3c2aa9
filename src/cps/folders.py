"""Folders of images: FOLDER/class name/*.jpg becomes one tensor of bytes, decoded once.

Images are decoded in parallel, straight to the size that training needs, and kept in a cache that is keyed by their
content, so a second run reads one file. Grey, palette, transparent, CMYK, 16-bit, animated and rotated pictures
become plain colour; what cannot be read is named.
"""

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from cps import storage

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
LARGEST = 200_000_000  # pixels; beyond that a small file may be made to fill the memory
READER = 1  # counted up whenever the same file would become other pixels


class ImageError(ValueError):
    """An image cannot be read; the message names the file."""


@dataclass(frozen=True)
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


def read_folder(
    folder: str | Path,
    *,
    size: int,
    skip_damaged: bool = False,
    cache: str | Path | None = None,
    workers: int = 8,
    watch: Callable[[int, int], None] | None = None,
) -> FolderImages:
    """Decode all images of a folder to squares of `size` pixels, or take them from the cache.

    Each is scaled so that its short side is `size` and cut at its middle. A damaged one raises `ImageError` with its
    path, or is skipped and listed. `watch` is called with the images done and in all.
    """
    files = list_images(folder)
    kept = None if cache is None else Path(cache) / f"{_content_key(Path(folder), files, size, workers)}.safetensors"
    if kept is not None and kept.exists():
        try:
            return _from_cache(kept)
        except storage.FileError:
            kept.unlink()

    decoded, skipped = _decode_all(files, size, skip_damaged, workers, watch)
    if not decoded:
        raise ImageError(f"none of the {len(files)} images in '{folder}' can be read; the first: {skipped[0]}")
    read = FolderImages(
        torch.from_numpy(np.stack([pixels for _, pixels in decoded])),
        [path.parent.name for path, _ in decoded],
        [str(path.relative_to(folder)) for path, _ in decoded],
        skipped,
    )
    if kept is not None and not skipped:
        header = {"labels": read.labels, "paths": read.paths}
        storage.write(kept, "images", header, {"images": read.images})
    return read


def _decode_all(
    files: list[Path], size: int, skip_damaged: bool, workers: int, watch: Callable[[int, int], None] | None
) -> tuple[list[tuple[Path, np.ndarray]], list[str]]:
    """Return each image that can be read with its path, and what is wrong with the others."""

    def decode(path: Path) -> np.ndarray | str:
        try:
            return decode_image(path, size)
        except ImageError as error:
            if not skip_damaged:
                raise
            return str(error)

    decoded, skipped = [], []
    with ThreadPoolExecutor(max(1, workers)) as pool:
        for done, (path, result) in enumerate(zip(files, pool.map(decode, files), strict=True), start=1):
            if isinstance(result, str):
                skipped.append(result)
            else:
                decoded.append((path, result))
            if watch is not None:
                watch(done, len(files))
    return decoded, skipped


def list_images(folder: str | Path) -> list[Path]:
    """Return the images in the folders of all classes, sorted; refuse a folder that has none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder '{folder}'")
    classes = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not classes:
        raise ValueError(f"'{folder}' has no folders in it; put the images of each class in a folder of that name")
    files = []
    for name in classes:
        found = sorted(p for p in name.iterdir() if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))
        if not found:
            raise ValueError(
                f"the folder of class '{name.name}' holds no image; known are {', '.join(sorted(SUFFIXES))}"
            )
        files += found
    return files


def decode_image(path: Path, size: int) -> np.ndarray:
    """Return an image as bytes of shape (3, size, size); raise `ImageError` for one that cannot be read."""
    try:
        with Image.open(path) as opened:
            if opened.width * opened.height > LARGEST:
                raise ImageError(f"'{path}' has {opened.width} x {opened.height} pixels, more than can be read safely")
            opened.draft("RGB", (size, size))  # lets JPEG decode at a fraction of its size
            picture = _plain_colour(ImageOps.exif_transpose(opened))
    except ImageError:
        raise
    except Exception as error:  # decoders raise whatever they like
        raise ImageError(f"'{path}' cannot be read as an image ({type(error).__name__}: {error})") from error
    square = ImageOps.fit(picture, (size, size), Image.Resampling.BILINEAR)
    return np.asarray(square).transpose(2, 0, 1).copy()


def _plain_colour(picture: Image.Image) -> Image.Image:
    """Return a picture in any mode as plain colour: 16 bits are scaled, what is transparent becomes white."""
    if picture.mode.startswith("I") or picture.mode == "F":
        values = np.asarray(picture, dtype=np.float64)
        values = values / 257 if values.max(initial=0) > 255 else values
        return Image.fromarray(values.clip(0, 255).astype(np.uint8)).convert("RGB")
    if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        white = Image.new("RGBA", picture.size, "white")
        return Image.alpha_composite(white, picture.convert("RGBA")).convert("RGB")
    return picture.convert("RGB")


def _content_key(folder: Path, files: list[Path], size: int, workers: int) -> str:
    def digest(path: Path) -> str:
        return f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}"

    with ThreadPoolExecutor(max(1, workers)) as pool:
        lines = list(pool.map(digest, files))
    return hashlib.sha256("\n".join([f"reader {READER}, size {size}", *lines]).encode()).hexdigest()


def _from_cache(path: Path) -> FolderImages:
    header, tensors = storage.read(path, "images")
    return FolderImages(tensors["images"], header["labels"], header["paths"], [])
