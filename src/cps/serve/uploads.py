"""Decode uploaded image files within limits. Their names are used in messages only, never as paths."""

import io

import torch
from PIL import Image
from torch import Tensor

from cps.data.decode import FORMATS, MAX_PIXELS, ImageError, ImageFormat
from cps.serve.middleware import Limits


class Upload(io.BytesIO):
    """The content of an uploaded file; `str` gives the name it was sent with."""

    def __init__(self, name: str, content: bytes):
        super().__init__(content)
        self.label = name.encode("utf-8", "replace").decode()[:200] or "an image without a name"

    def __str__(self) -> str:
        return self.label


def decode_upload(upload: Upload, image_format: ImageFormat, limits: Limits) -> Tensor:
    """Return an uploaded image as uint8 pixels (3, size, size); raise `ImageError` if it cannot be read."""
    if not upload.getbuffer().nbytes:
        raise ImageError(f"'{upload}' is empty: send an image file.")
    try:
        with Image.open(upload, formats=FORMATS) as opened:
            width, height = opened.size
            opened.draft("RGB", (image_format.scaled, image_format.scaled))  # JPEG is decoded at a fraction of its size
            pixels = opened.width * opened.height
    except Image.DecompressionBombError:
        raise ImageError(f"'{upload}' has too many pixels to be read safely: send a smaller image.") from None
    except Exception:  # decoders raise exceptions of any type
        raise ImageError(
            f"'{upload}' is not an image in a supported format: send JPEG, PNG, WebP, GIF, BMP, TIFF or PPM."
        ) from None
    max_pixels = min(limits.megapixels * 10**6, MAX_PIXELS)
    if pixels > max_pixels:
        raise ImageError(
            f"'{upload}' has {width} x {height} pixels, more than {max_pixels // 10**6} million: send a smaller image."
        )
    upload.seek(0)
    try:
        return torch.from_numpy(image_format.decode(upload))
    except Exception:
        raise ImageError(f"'{upload}' is damaged or incomplete: send it again, or open it and save it again.") from None
