"""Learn three folders of photos, one of them with more photos of known classes, up to a served model.

The photos are small synthetic pictures; `--photos DIR` takes an image folder of your own, DIR/CLASS/*.jpg, and uses its
first nine classes. Photos are learned on a pretrained backbone, which comes with the extra `pretrained`; without it,
or with `--quick`, a small network with random weights stands in for it, as another file of weights would.
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
from safetensors.torch import save_file

from cps import Architecture
from cps.cli import app
from cps.network.pretrained import installed_backbone

CLASSES = ["bolt", "gear", "hook", "knob", "nut", "pin", "ring", "spring", "washer"]
FOLDERS = {"january": slice(0, 4), "february": slice(4, 8), "march": slice(6, 9)}  # march has known classes, too
INBOX = 3  # photos of each class that are not learned


def draw(number: int, images: int, side: int) -> Iterator[Image.Image]:
    """Yield pictures of a class: stripes and a colour that depend on its number, moved and with noise."""
    draws = np.random.default_rng(number)
    colour, frequency, angle = draws.uniform(60, 220, 3), draws.uniform(2, 9), draws.uniform(0, np.pi)
    rows, columns = np.mgrid[:side, :side] / side
    for _ in range(images):
        waves = np.sin(2 * np.pi * frequency * (rows * np.cos(angle) + columns * np.sin(angle)) + draws.uniform(0, 6))
        pixels = colour + 50 * waves[..., None] + draws.normal(0, 15, (side, side, 3))
        yield Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def write_photos(folder: Path, side: int) -> None:
    """Write FOLDER/CLASS/*.jpg."""
    for number, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for index, image in enumerate(draw(number, 20, side)):
            image.save(folder / name / f"{index:02}.jpg")


def split_photos(photos: Path, most: int) -> None:
    """Copy photos to january/CLASS, february/CLASS, march/CLASS, and others to inbox/CLASS."""
    classes = sorted(path for path in photos.iterdir() if path.is_dir())[: len(CLASSES)]
    for path in classes:
        files = sorted(path.iterdir())[:most]
        homes = [name for name, part in FOLDERS.items() if path in classes[part]]
        for index, file in enumerate(files):
            home = "inbox" if index < INBOX else homes[index % len(homes)]
            target = Path(home) / path.name
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)


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
                reply = httpx.post(f"{address[0]}/predict", files={"images": file}, timeout=60).json()
            picture = httpx.get(f"{address[0]}/confusion.svg", timeout=60)
            print(f"\n$ cps serve {model}\n{image}: {reply['images'][0]['class']}")
            print(f"The page shows the confusion matrix, a picture of {len(picture.content):,} bytes.")
        server.terminate()


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="use tiny pictures and the small network")
parser.add_argument("--photos", type=Path, help="an image folder of your own")
options = parser.parse_args()
photos = None if options.photos is None else options.photos.resolve()
os.chdir(tempfile.mkdtemp(prefix="cps-"))
if photos is None:
    photos = Path("photos")
    write_photos(photos, side=16 if options.quick else 224)
split_photos(photos, most=20 if options.quick else 60)
first = []
if options.quick or installed_backbone() is None:
    save_file(Architecture("small").make(0).state_dict(), "weights.safetensors")
    first = ["--backbone", "small", "--weights", "weights.safetensors", "--size", "16" if options.quick else "64"]
for folder in FOLDERS:
    cps("learn", folder, "--model", "parts.cps", *first)
    first = []
    shutil.rmtree(folder)  # the images are no longer needed
cps("inspect", "parts.cps", "--picture", "confusion.svg")
cps("verify", "parts.cps")
cps("predict", "inbox", "--model", "parts.cps", "--reject", "0")
image = next(Path("inbox").glob("*/*"))
cps("rename", "parts.cps", image.parent.name, f"{image.parent.name} M8", "--yes")
query_server("parts.cps", image)
cps("forget", "parts.cps", "--class", f"{image.parent.name} M8", "--yes")
cps("card", "parts.cps", "--to", "parts.md")
print(f"\nThe model is {Path('parts.cps').resolve()}, and its card parts.md lies beside it.")
