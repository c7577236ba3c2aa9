"""Folders of images, from the first shipment to predictions: the commands of docs/folders.md on real digits."""

import shutil
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from cps.cli import app

QUICK = "--quick" in sys.argv
NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
SHIPMENTS = {"january": NAMES[:4], "february": NAMES[4:7], "march": NAMES[7:]}


def write_images(root: Path) -> None:
    """Write scikit-learn's digits as PNG files: a folder for each class in each shipment, and some to predict."""
    pixels, labels = load_digits(return_X_y=True)
    for index, (image, label) in enumerate(zip(pixels.reshape(-1, 8, 8), labels, strict=True)):
        name = NAMES[label]
        shipment = next(month for month, names in SHIPMENTS.items() if name in names)
        folder = root / ("inbox" if index >= 1700 else shipment) / name
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 255 / 16).astype(np.uint8)).save(folder / f"{index}.png")


def cps(*arguments: str) -> None:
    """Run a command as the terminal would."""
    print(f"\n$ cps {' '.join(arguments)}")
    app(arguments, standalone_mode=False)


write_images(Path())
options = ["--epochs", "1"] if QUICK else []
for month in SHIPMENTS:
    cps("learn", month, "--model", "digits.cps", *options)
    shutil.rmtree(month)  # the images are not needed any more
cps("inspect", "digits.cps")
cps("verify", "digits.cps")
cps("predict", "inbox/seven", "--model", "digits.cps")
cps("predict", "inbox", "--model", "digits.cps", "--group-by-folder", "--csv")
cps("forget", "digits.cps", "--task", "1", "--yes")
cps("inspect", "digits.cps")
