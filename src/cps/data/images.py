"""Convert images in any form to one tensor, and reject pixels that no network can use."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cps.data.items import image_of, is_dataset, reject_loader

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)  # not bytes

NOT_PIXELS = ("1", "P", "PA")  # modes of PIL whose values are bits, or indices into a palette
AS_RGB = 'image.convert("RGB")'


def as_images(images: Any) -> Tensor:
    """Return images (tensor, array, list of images or data set) as one tensor.

    Pictures (N, channels, height, width) must be bytes (uint8), which the network scales to 0..1, or floats, which it
    uses unscaled. Other integers raise `ValueError`, since their scale is unknown; so do NaN and infinite pixels.
    """
    _reject_path(images)
    reject_loader(images)
    if isinstance(images, Mapping):
        images = image_of(images)
    if is_dataset(images):
        images = [image_of(images[index]) for index in range(len(images))]
    if isinstance(images, tuple) and len(images) == 2 and getattr(images[0], "ndim", 0) > 1 == np.ndim(images[1]):
        raise TypeError("expected images without labels, got a pair")
    if _is_pil_image(images):
        images = [images]
    if isinstance(images, (list, tuple)):
        if not images:
            raise ValueError("expected at least one image, got none")
        images = _stack([_as_image(image) for image in images])
    if not isinstance(images, Tensor):
        images = _as_tensor(images)
    tensor = images.detach()
    if tensor.is_complex():
        raise TypeError("images must be real numbers, got complex ones")
    if tensor.ndim < 2:
        raise ValueError(f"expected a batch of images (N, ...), got shape {tuple(tensor.shape)}; one is image[None]")
    if len(tensor) == 0:
        raise ValueError("expected at least one image, got none")
    if tensor.dtype in (torch.float64, torch.float16, torch.bfloat16):
        tensor = tensor.float()
    if tensor.ndim > 3 and tensor.dtype in INTEGERS:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(
            f"pictures must be bytes (uint8, 0 to 255) or floats, got {kind}; scale them to floats from 0 to 1"
        )
    check_pixels(tensor)
    return tensor


def check_pixels(images: Tensor) -> None:
    """Raise `ValueError` for NaN and infinite pixels."""
    if not images.is_floating_point():
        return
    bad = ~torch.isfinite(images).flatten(1).all(dim=1)
    if bad.any():
        index = int(bad.nonzero()[0])
        raise ValueError(f"image {index} has NaN or infinite pixels ({int(bad.sum())} of {len(images)} images)")


def square_size(shape: Sequence[int] | None) -> int | None:
    """Return the size in pixels of square colour images, shape (3, size, size); None for other shapes."""
    if shape is None or len(shape) != 3 or shape[0] != 3 or shape[1] != shape[2]:
        return None
    return shape[1]


def _stack(images: Sequence[Tensor]) -> Tensor:
    other = next((image for image in images if image.shape != images[0].shape), None)
    if other is not None:
        shapes = tuple(images[0].shape), tuple(other.shape)
        same_size = shapes[0][1:] == shapes[1][1:]
        hint = f"; convert pictures to one mode: {AS_RGB}" if same_size else "; resize them"
        raise ValueError(f"images must have one shape, got {shapes[0]} and {shapes[1]}{hint}")
    return torch.stack(list(images))


def _as_image(item: Any) -> Tensor:
    """Return one item of a data set as a tensor; PIL images become bytes (channels, height, width)."""
    item = image_of(item) if isinstance(item, Mapping) else item
    if isinstance(item, Tensor):
        return item
    _reject_path(item)
    if _is_pil_image(item):
        if item.mode in NOT_PIXELS:
            raise ValueError(f"a picture of mode {item.mode!r} does not hold pixel values; pass {AS_RGB}")
        array = np.asarray(item)
        item = array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
    return _as_tensor(item)


def _as_tensor(values: Any) -> Tensor:
    """Return an array, or anything that numpy converts to one, as a tensor."""
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        kind = f"an array of {array.dtype}" if isinstance(values, np.ndarray) else type(values).__name__
        raise TypeError(f"images must be tensors, arrays of numbers, PIL images or a data set, got {kind}")
    return torch.as_tensor(np.require(array.astype(array.dtype.newbyteorder("="), copy=False), requirements=["C", "W"]))


def _is_pil_image(item: Any) -> bool:
    return hasattr(item, "getbands")


def _reject_path(item: Any) -> None:
    if isinstance(item, str | Path):
        raise TypeError(
            f"images must be tensors, arrays or a data set, got the path '{item}'; read it with cps.read_image, or a "
            "folder with cps.read_folder"
        )
