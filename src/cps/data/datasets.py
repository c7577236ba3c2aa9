"""Load the data sets that the recipes use."""

from pathlib import Path

import numpy as np
import torch

from cps.data.class_orders import class_order
from cps.data.examples import Data
from cps.data.image_folder import ImageFolder

DIGITS, DIGITS_TRAIN = Path(__file__).with_name("digits.npz"), 1437
CUB_URL = "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz"
CUB_MD5 = "97eceeb196236b17998738112f37df78"
IMAGE_SIZE, TEST_MARGIN = 224, 256 / 224 - 1  # in testing, the short side is scaled to 256 and the centre cropped


def read_digits(folder: Path | None = None) -> tuple[Data, Data]:
    """Return 8x8 handwritten digits, 80 % for training and 20 % for testing (digits.txt says where they are from)."""
    if folder is not None:
        raise ValueError(f"the digits come with cps and need no data folder, got '{folder}'; leave it out")
    with np.load(DIGITS) as file:
        images = file["images"][:, None].astype(np.float32) / 16
        labels = file["labels"].astype(int)
    return (images[:DIGITS_TRAIN], labels[:DIGITS_TRAIN]), (images[DIGITS_TRAIN:], labels[DIGITS_TRAIN:])


def read_cifar100(folder: Path | None) -> tuple[Data, Data]:
    """Return CIFAR-100 from a folder with `cifar-100-python` in it; download it there if it is missing."""
    from torchvision.datasets import CIFAR100

    root = folder or Path("data")
    parts = []
    for train in (True, False):
        try:
            part = CIFAR100(root, train=train, download=not (root / CIFAR100.base_folder).is_dir())
        except (RuntimeError, OSError) as error:
            raise ValueError(
                f"CIFAR-100 is missing or damaged in '{root}' and cannot be downloaded ({error}); put the unpacked "
                f"folder '{CIFAR100.base_folder}' there, or choose another folder with --data"
            ) from error
        parts.append((torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous(), part.targets))
    return parts[0], parts[1]


def read_cub200(folder: Path | None) -> tuple[Data, Data]:
    """Return CUB-200-2011 from FOLDER/train and FOLDER/test, or from its archive, downloaded if it is missing."""
    root = folder or Path("data")
    if (root / "train").is_dir():
        return read_image_folders(root)
    images = root / "CUB_200_2011" / "images"
    if not images.is_dir():
        _download_cub200(root)
    files = [line.split()[1] for line in (images.parent / "images.txt").read_text(encoding="utf-8").splitlines()]
    split = [
        line.split()[1] for line in (images.parent / "train_test_split.txt").read_text(encoding="utf-8").splitlines()
    ]
    train, test = ([images / f for f, part in zip(files, split, strict=True) if part == kind] for kind in ("1", "0"))
    cache = root / "cache"
    return (
        ImageFolder(images, size=IMAGE_SIZE, files=train, cache=cache),
        ImageFolder(images, size=IMAGE_SIZE, margin=TEST_MARGIN, files=test, cache=cache),
    )


def read_image_folders(folder: Path | None) -> tuple[Data, Data]:
    """Return the images in FOLDER/train/CLASS and FOLDER/val/CLASS (or FOLDER/test), decoded task by task."""
    root = folder or Path("data")
    test = next((root / name for name in ("val", "test") if (root / name).is_dir()), root / "val")
    for part in (root / "train", test):
        if not part.is_dir():
            raise ValueError(
                f"there is no folder '{part}'; put the images into {root}/train/CLASS/*.jpg and "
                f"{root}/val/CLASS/*.jpg, or choose another folder with --data"
            )
    cache = root / "cache"
    return (
        ImageFolder(root / "train", size=IMAGE_SIZE, cache=cache),
        ImageFolder(test, size=IMAGE_SIZE, margin=TEST_MARGIN, cache=cache),
    )


def read_imagenet100(folder: Path | None) -> tuple[Data, Data]:
    """Return 100 classes of ImageNet: those in the folder; of more, the first 100 in the order of seed 1993."""
    parts = read_image_folders(folder)
    classes = sorted(set(parts[0].targets))
    if len(classes) > 100:
        chosen = set(class_order(classes, 1993)[:100])
        for part in parts:
            part.keep(chosen)
    return parts


def _download_cub200(root: Path) -> None:
    from torchvision.datasets.utils import download_and_extract_archive

    try:
        download_and_extract_archive(CUB_URL, str(root), md5=CUB_MD5)
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"CUB-200-2011 is not in '{root}' and cannot be downloaded ({error}); put its folder 'CUB_200_2011' there, "
            "or folders train/CLASS/*.jpg and test/CLASS/*.jpg, or choose another folder with --data"
        ) from error
