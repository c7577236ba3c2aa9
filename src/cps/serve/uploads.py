"""Uploads: image files from outside become pixels, within bounds, and none of their names is ever a path."""

import io

import torch
from PIL import Image
from torch import Tensor

from cps.data.decode import FORMATS, LARGEST, ImageError, decode_image
from cps.serve.middleware import Limits


class Upload(io.BytesIO):
    """The content of an uploaded file, which prints as the name it came with."""

    def __init__(self, name: str, content: bytes):
        super().__init__(content)
        self.label = name.encode("utf-8", "replace").decode()[:200] or "an image without a name"

    def __str__(self) -> str:
        return self.label

    __repr__ = __str__


def pixels_of(upload: Upload, size: int, limits: Limits) -> Tensor:
    """Return an uploaded image as bytes of shape (3, size, size); raise `ImageError` for what is none."""
    if not upload.getbuffer().nbytes:
        raise ImageError(f"'{upload}' is empty; send an image file")
    try:
        with Image.open(upload, formats=FORMATS) as opened:
            width, height = opened.size
            opened.draft("RGB", (size, size))  # JPEG decodes at a fraction of its size
            pixels = opened.width * opened.height
    except Image.DecompressionBombError:
        raise ImageError(f"'{upload}' has more pixels than can be read safely; send a smaller image") from None
    except Exception:  # decoders raise whatever they like
        raise ImageError(
            f"'{upload}' is not an image that can be read; send JPEG, PNG, WebP, GIF, BMP, TIFF or PPM"
        ) from None
    most = min(limits.megapixels * 10**6, LARGEST)
    if pixels > most:
        raise ImageError(
            f"'{upload}' has {width} x {height} pixels, more than {most // 10**6} million; send a smaller image"
        )
    upload.seek(0)
    try:
        return torch.from_numpy(decode_image(upload, size))
    except Exception:
        raise ImageError(f"'{upload}' is damaged, or cut short; send it again or open and save it anew") from None
