"""One image file to bytes: a square of the size that training needs, in plain colour.

Grey, palette, transparent, CMYK, 16-bit, animated and rotated pictures become plain colour; what cannot be read is
named.
"""

from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # whatever a file is called; no other runs
LARGEST = 40_000_000  # pixels to decode, which for JPEG are fewer; beyond that a small file may fill the memory
READER = 3  # counted up whenever the same file would become other pixels


class ImageError(ValueError):
    """An image cannot be read; the message names the file."""


def read_image(path: str | Path, *, size: int) -> Tensor:
    """Return an image file as `read_folder` would: its middle as a square in colour, bytes of shape (3, size, size)."""
    return torch.from_numpy(decode_image(Path(path), size))


def decode_image(path: Path | BinaryIO, size: int, margin: float = 0.0) -> np.ndarray:
    """Return an image as bytes of shape (3, size, size); raise `ImageError` for one that cannot be read."""
    scaled = round(size * (1 + margin))
    if isinstance(path, Path) and not path.is_file():  # opening a pipe would wait for ever
        raise ImageError(f"'{path}' is not a file" if path.exists() else f"there is no file '{path}'")
    try:
        with Image.open(path, formats=FORMATS) as opened:
            width, height = opened.size
            opened.draft("RGB", (scaled, scaled))  # lets JPEG decode at a fraction of its size
            if opened.width * opened.height > LARGEST:
                raise ImageError(f"'{path}' has {width} x {height} pixels, more than can be read safely")
            ImageOps.exif_transpose(opened, in_place=True)
            picture = _plain_colour(opened)
        square = ImageOps.fit(picture, (scaled, scaled), Image.Resampling.BILINEAR)
    except ImageError:
        raise
    except UnidentifiedImageError:
        raise ImageError(f"'{path}' is not an image of a known kind ({', '.join(FORMATS)})") from None
    except Exception as error:  # decoders raise whatever they like
        raise ImageError(f"'{path}' cannot be read as an image ({type(error).__name__}: {error})") from error
    edge = (scaled - size) // 2
    square = square.crop((edge, edge, edge + size, edge + size)) if scaled > size else square
    return np.asarray(square).transpose(2, 0, 1).copy()


def _plain_colour(picture: Image.Image) -> Image.Image:
    """Return a picture in any mode as plain colour: more bits are scaled, what is transparent becomes white."""
    if picture.mode.startswith("I") or picture.mode == "F":
        values = np.nan_to_num(np.asarray(picture, dtype=np.float32))
        highest = values.max(initial=0)
        scale = 1 / 257 if highest > 255 else 255 if picture.mode == "F" and highest <= 1 else 1
        return Image.fromarray((values * scale).clip(0, 255).astype(np.uint8)).convert("RGB")
    if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        clear = picture if picture.mode == "RGBA" else picture.convert("RGBA")
        white = Image.new("RGB", picture.size, "white")
        white.paste(clear, mask=clear)
        return white
    return picture.convert("RGB")
