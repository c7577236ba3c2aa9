"""Learn folders of images, predict, inspect, verify, serve and forget: the commands of docs/practitioners.md.

The images are handwritten digits, or with `--cifar100 DIR` some classes of CIFAR-100. The last folder of
CIFAR-100 has a single class.
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

from cps.cli import app
from cps.data.datasets import read_digits

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
DIGIT_FOLDERS = {"january": DIGITS[:4], "february": DIGITS[4:7], "march": DIGITS[7:]}
CIFAR_FOLDERS = {"january": ["apple", "bicycle", "rocket"], "february": ["lion", "sunflower"], "march": ["bottle"]}
LabelledImage = tuple[str, np.ndarray, bool]  # class, pixels, and whether it is a test image


def digits() -> Iterator[LabelledImage]:
    for part, is_test in zip(read_digits(), (False, True), strict=True):
        for image, label in zip(*part, strict=True):
            yield DIGITS[label], (image[0] * 255).astype(np.uint8), is_test


def cifar100(folder: str) -> Iterator[LabelledImage]:
    from torchvision.datasets import CIFAR100

    for is_train in (True, False):
        data = CIFAR100(folder, train=is_train)
        for image, label in zip(data.data, data.targets, strict=True):
            yield data.classes[label], image, not is_train


def write_images(images: Iterator[LabelledImage], folders: dict[str, list[str]]) -> None:
    """Write training images to FOLDER/CLASS/*.png, and test images to inbox/CLASS/*.png."""
    folder_of = {name: folder for folder, names in folders.items() for name in names}
    for index, (name, image, is_test) in enumerate(images):
        if name in folder_of:
            folder = Path("inbox" if is_test else folder_of[name]) / name
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{index}.png")


def cps(*arguments: str) -> None:
    """Run a cps command, and print it as in a terminal."""
    print(f"\n$ cps {' '.join(arguments)}", flush=True)
    app(arguments, standalone_mode=False)


def query_server(model: str, image: Path) -> None:
    """Serve a model, send one image to the server, and stop it."""
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
parser.add_argument("--quick", action="store_true", help="train for one epoch only")
parser.add_argument("--cifar100", help="the folder that contains cifar-100-python")
options = parser.parse_args()
folders = CIFAR_FOLDERS if options.cifar100 else DIGIT_FOLDERS
images = cifar100(str(Path(options.cifar100).resolve())) if options.cifar100 else digits()
os.chdir(tempfile.mkdtemp(prefix="cps-"))
write_images(images, folders)
for folder in folders:
    cps("learn", folder, "--model", "parts.cps", *(["--epochs", "1"] if options.quick else []))
    shutil.rmtree(folder)  # the images are no longer needed
cps("inspect", "parts.cps")
cps("verify", "parts.cps")
image = next(Path("inbox").glob(f"{folders['march'][0]}/*.png"))
cps("predict", str(image.parent), "--model", "parts.cps")
cps("predict", "inbox", "--model", "parts.cps", "--group-by-folder", "--csv")
query_server("parts.cps", image)
cps("forget", "parts.cps", "--task", "1", "--yes")
cps("inspect", "parts.cps")
print(f"\nThe model is {Path('parts.cps').resolve()}.")
