"""Folders of images, from the first shipment to a served model: the commands of docs/folders.md on real images.

They are scikit-learn's digits, or with `--cifar100 DIR` classes of CIFAR-100, one of which comes alone.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from cps.cli import app

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
DIGIT_SHIPMENTS = {"january": DIGITS[:4], "february": DIGITS[4:7], "march": DIGITS[7:]}
CIFAR_SHIPMENTS = {"january": ["apple", "bicycle", "rocket"], "february": ["lion", "sunflower"], "march": ["bottle"]}
Picture = tuple[str, np.ndarray, bool]  # its class, its pixels, and whether it is to be predicted


def digits() -> Iterator[Picture]:
    pixels, labels = load_digits(return_X_y=True)
    for index, (image, label) in enumerate(zip(pixels.reshape(-1, 8, 8), labels, strict=True)):
        yield DIGITS[label], (image * 255 / 16).astype(np.uint8), index >= 1700


def cifar100(folder: str) -> Iterator[Picture]:
    from torchvision.datasets import CIFAR100

    for is_train in (True, False):
        data = CIFAR100(folder, train=is_train)
        for image, label in zip(data.data, data.targets, strict=True):
            yield data.classes[label], image, not is_train


def write_images(pictures: Iterator[Picture], shipments: dict[str, list[str]]) -> None:
    """Write PNG files: a folder for each class in each shipment, and some to predict."""
    months = {name: month for month, names in shipments.items() for name in names}
    for index, (name, image, is_new) in enumerate(pictures):
        if name in months:
            folder = Path("inbox" if is_new else months[name]) / name
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{index}.png")


def cps(*arguments: str) -> None:
    """Run a command as the terminal would."""
    print(f"\n$ cps {' '.join(arguments)}", flush=True)
    app(arguments, standalone_mode=False)


def ask_server(model: str, image: Path) -> None:
    """Serve a model for a moment, and ask it about an image."""
    command = [sys.executable, "-m", "cps", "serve", model, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = re.search(r"http://\S+", server.stdout.readline())
        if address is not None:
            with image.open("rb") as file:
                reply = httpx.post(f"{address[0]}/predict", files={"images": file}, timeout=30).json()
            print(f"\n$ cps serve {model}\n{image}: {reply['images'][0]['class']} (task {reply['images'][0]['task']})")
        server.terminate()


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="one epoch only")
parser.add_argument("--cifar100", help="the folder that holds cifar-100-python")
asked = parser.parse_args()
shipments = CIFAR_SHIPMENTS if asked.cifar100 else DIGIT_SHIPMENTS
pictures = cifar100(str(Path(asked.cifar100).resolve())) if asked.cifar100 else digits()
os.chdir(tempfile.mkdtemp(prefix="cps-"))
write_images(pictures, shipments)
for month in shipments:
    cps("learn", month, "--model", "parts.cps", *(["--epochs", "1"] if asked.quick else []))
    shutil.rmtree(month)  # the images are not needed any more
cps("inspect", "parts.cps")
cps("verify", "parts.cps")
last = next(Path("inbox").glob(f"{shipments['march'][0]}/*.png"))
cps("predict", str(last.parent), "--model", "parts.cps")
cps("predict", "inbox", "--model", "parts.cps", "--group-by-folder", "--csv")
ask_server("parts.cps", last)
cps("forget", "parts.cps", "--task", "1", "--yes")
cps("inspect", "parts.cps")
print(f"\nThe model is {Path('parts.cps').resolve()}.")
