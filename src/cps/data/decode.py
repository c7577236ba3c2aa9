"""Decode an image file to a square of bytes in RGB.

Grey, palette, transparent, CMYK, 16-bit and animated images become plain RGB, and the EXIF orientation is applied. An
unreadable file raises `ImageError` with its name.
"""

from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")  # in this order; no other decoder runs
MAX_PIXELS = 40_000_000  # to decode; a small file with more may fill the memory. JPEG decodes at a reduced size
DECODER_VERSION = 3  # increase it whenever a file would decode to other pixels


class ImageError(ValueError):
    """An image cannot be read; the message names the file."""


class ImageFormat(NamedTuple):
    """How a file becomes an image of a model: a square of `size` pixels, and the `margin` that is cropped.

    The short side is scaled to `size * (1 + margin)` pixels, of which the central square stays.
    """

    size: int
    margin: float = 0.0

    @property
    def scaled(self) -> int:
        """The pixels that the short side is scaled to."""
        return round(self.size * (1 + self.margin))

    def decode(self, file: Path | BinaryIO) -> np.ndarray:
        """Return an image as bytes of shape (3, size, size); raise `ImageError` if it cannot be read."""
        return decode_image(file, self.size, self.margin)


def read_image(path: str | Path, *, size: int, margin: float = 0.0) -> Tensor:
    """Return an image file as `read_folder` does: its central square in RGB, as bytes of shape (3, size, size)."""
    return torch.from_numpy(decode_image(Path(path), size, margin))


def decode_image(path: Path | BinaryIO, size: int, margin: float = 0.0) -> np.ndarray:
    """Return an image as bytes of shape (3, size, size); raise `ImageError` if it cannot be read.

    The short side is scaled to `size * (1 + margin)` pixels, and the centre is cropped.
    """
    scaled = ImageFormat(size, margin).scaled
    if isinstance(path, Path) and not path.is_file():  # opening a pipe would block forever
        raise ImageError(f"'{path}' is not a file" if path.exists() else f"there is no file '{path}'")
    Image.preinit()  # the first five formats; otherwise Pillow imports the decoders of all that it knows
    try:
        with Image.open(path, formats=FORMATS) as opened:
            width, height = opened.size
            opened.draft("RGB", (scaled, scaled))  # lets JPEG decode at a fraction of its size
            if opened.width * opened.height > MAX_PIXELS:
                raise ImageError(f"'{path}' has {width} x {height} pixels, more than can be decoded safely")
            ImageOps.exif_transpose(opened, in_place=True)
            image = _as_rgb(opened)
        square = ImageOps.fit(image, (scaled, scaled), Image.Resampling.BILINEAR)
    except ImageError:
        raise
    except UnidentifiedImageError:
        raise ImageError(f"'{path}' is not an image in a supported format ({', '.join(FORMATS)})") from None
    except Exception as error:  # decoders raise many types
        raise ImageError(f"'{path}' cannot be read as an image ({type(error).__name__}: {error})") from error
    edge = (scaled - size) // 2
    square = square.crop((edge, edge, edge + size, edge + size)) if scaled > size else square
    return np.asarray(square).transpose(2, 0, 1).copy()


def _as_rgb(image: Image.Image) -> Image.Image:
    """Return an image of any mode in RGB: more than 8 bits are scaled down, transparent pixels become white."""
    if image.mode.startswith("I") or image.mode == "F":
        values = np.nan_to_num(np.asarray(image, dtype=np.float32))
        highest = values.max(initial=0)
        scale = 1 / 257 if highest > 255 else 255 if image.mode == "F" and highest <= 1 else 1
        return Image.fromarray((values * scale).clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        rgba = image if image.mode == "RGBA" else image.convert("RGBA")
        white = Image.new("RGB", image.size, "white")
        white.paste(rgba, mask=rgba)
        return white
    return image.convert("RGB")
