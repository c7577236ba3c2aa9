"""Images in any form become one tensor; pixels that no network can use are refused."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


def as_images(images: Any) -> Tensor:
    """Return images (tensor, array, list of images or `Dataset`) as one tensor; refuse NaN and infinite pixels."""
    if isinstance(images, Dataset):
        items = [images[index] for index in range(len(images))]  # pyright: ignore[reportArgumentType]
        images = [item[0] if isinstance(item, tuple) else item for item in items]
    if isinstance(images, (list, tuple)):
        if not images:
            raise ValueError("there are no images")
        images = torch.stack([_as_image(image) for image in images])
    tensor = images if isinstance(images, Tensor) else torch.as_tensor(np.ascontiguousarray(images))
    if tensor.ndim < 2:
        raise ValueError(f"expected a batch of images (N, ...), got shape {tuple(tensor.shape)}")
    if len(tensor) == 0:
        raise ValueError("there are no images")
    if tensor.dtype in (torch.float64, torch.float16, torch.bfloat16):
        tensor = tensor.float()
    refuse_bad_pixels(tensor)
    return tensor


def refuse_bad_pixels(images: Tensor) -> None:
    """Raise `ValueError` for NaN and infinite pixels."""
    if not images.is_floating_point():
        return
    bad = ~torch.isfinite(images).flatten(1).all(dim=1)
    if bad.any():
        index = int(bad.nonzero()[0])
        raise ValueError(f"image {index} has NaN or infinite pixels ({int(bad.sum())} of {len(images)} images)")


def _as_image(item: Any) -> Tensor:
    """Return one item of a data set as a tensor; pictures become (channels, height, width) bytes."""
    if isinstance(item, Tensor):
        return item
    array = np.asarray(item)
    if hasattr(item, "getbands"):  # a PIL picture
        array = array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
    return torch.as_tensor(array.copy())
