"""Fuzz the image reader: damaged pictures of every format become pixels of the right shape, or an `ImageError`.

    python fuzz/images.py --cases 50000 --seed 0

Each case is a small valid file with some bytes changed, cut off, repeated, or given the large numbers that headers
like to trust. Anything but pixels or an `ImageError` ends the run and leaves the file in --keep; so does a case that
takes too long, or too much memory.
"""

import argparse
import io
import random
import resource
import sys
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image

from cps.data.decode import ImageError, decode_image

SIZE = 8  # pixels of the result
SLOWEST = 5.0  # seconds of a core for one case; most take a millisecond
MOST_MEMORY = 2**30  # bytes beyond what the process starts with
NUMBERS = [0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]  # what headers trust


def seeds() -> list[tuple[str, bytes]]:
    """Return small valid pictures: every format that is read, in its common modes and options."""
    pixels = np.random.default_rng(0).integers(0, 256, (13, 17, 4), dtype=np.uint8)
    colour, grey, clear = (Image.fromarray(pixels[..., part]) for part in (slice(3), 0, slice(4)))
    deep = Image.fromarray(pixels[..., 0].astype(np.uint16) * 257)
    exif = Image.Exif()
    exif[0x0112] = 6
    made = [
        *((name, picture, {}) for name in ("png", "tiff", "webp") for picture in (colour, grey, clear)),
        *((name, picture, {}) for name in ("jpeg", "bmp", "ppm", "gif") for picture in (colour, grey)),
        ("jpeg", colour, {"progressive": True, "exif": exif}),
        ("jpeg", colour.convert("CMYK"), {}),
        ("png", deep, {}),
        ("png", colour.convert("P"), {"transparency": 0}),
        ("png", colour.convert("1"), {"exif": exif}),
        ("tiff", deep, {}),
        ("tiff", Image.fromarray(pixels[..., 0].astype(np.float32)), {}),
        *(("tiff", colour, {"compression": kind}) for kind in ("tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg")),
        ("tiff", colour.convert("1"), {"compression": "group4"}),
        ("webp", colour, {"lossless": True, "exif": exif}),
        ("webp", colour, {"save_all": True, "append_images": [clear, grey]}),
        ("gif", colour, {"save_all": True, "append_images": [grey, colour]}),
    ]
    files = []
    for name, picture, options in made:
        file = io.BytesIO()
        picture.save(file, format=name, **options)
        files.append((name, file.getvalue()))
    return files


def damaged(content: bytes, other: bytes, draws: random.Random) -> bytes:
    """Return the content with one to eight changes."""
    changed = bytearray(content)
    for _ in range(draws.choice((1, 1, 1, 2, 4, 8))):
        at = draws.randrange(len(changed)) if draws.random() < 0.5 else draws.randrange(min(64, len(changed)))
        how = draws.randrange(7)
        if how == 0:
            changed[at] ^= 1 << draws.randrange(8)
        elif how == 1:
            changed[at] = draws.randrange(256)
        elif how == 2:
            width = draws.choice((1, 2, 4))
            number = draws.choice(NUMBERS) % 256**width
            changed[at : at + width] = number.to_bytes(width, draws.choice(("big", "little")))
        elif how == 3:
            del changed[max(1, at) :]
        elif how == 4:
            del changed[at : at + draws.randrange(1, 16)]
        elif how == 5:
            changed[at:at] = changed[at : at + draws.randrange(1, 64)] * draws.choice((1, 2, 50))
        else:
            start = draws.randrange(len(other))
            changed[at : at + 16] = other[start : start + 16]
        changed = changed or bytearray(b"\0")
    return bytes(changed)


def with_sums(content: bytes) -> bytes:
    """Return a PNG file with the right checksums, so that what comes after them is reached."""
    parts, at = [content[:8]], 8
    while at + 12 <= len(content):
        end = at + 8 + int.from_bytes(content[at : at + 4], "big")
        parts += [content[at:end], zlib.crc32(content[at + 4 : end]).to_bytes(4, "big")]
        at = end + 4
    return b"".join([*parts, content[at:]])


def cases(number: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Yield so many damaged files, with the suffix of their format or of another; the same for the same seed."""
    draws = random.Random(seed)
    files = seeds()
    for _ in range(number):
        name, content = draws.choice(files)
        suffix, other = draws.choice(files)
        changed = damaged(content, other, draws)
        if name == "png" and draws.random() < 0.7:
            changed = with_sums(changed)
        yield name if draws.random() < 0.9 else suffix, changed


def outcome(path: Path) -> str:
    """Read a file; return "pixels" or "refused". Any other end is a fault, and raises."""
    began = time.process_time()
    try:
        pixels = decode_image(path, SIZE)
        if pixels.shape != (3, SIZE, SIZE) or pixels.dtype != np.uint8:
            raise AssertionError(f"the pixels are {pixels.dtype} {pixels.shape}")
        result = "pixels"
    except ImageError:
        result = "refused"
    seconds = time.process_time() - began
    if seconds > SLOWEST:
        raise AssertionError(f"it took {seconds:.1f} s")
    return result


def main() -> None:
    """Run the cases; stop at the first fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path("fuzz-fault"), help="where a fault is left")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")  # Pillow warns of much that it then refuses
    began, counts = time.monotonic(), Counter()
    at_start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + 4 * MOST_MEMORY, resource.RLIM_INFINITY))
    with TemporaryDirectory() as folder:
        for index, (suffix, content) in enumerate(cases(chosen.cases, chosen.seed)):
            path = Path(folder) / f"case.{suffix}"
            path.write_bytes(content)
            try:
                counts[suffix, outcome(path)] += 1
                memory = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - at_start)
                if memory > MOST_MEMORY:
                    raise AssertionError(f"reading takes {memory / 2**20:.0f} MiB")
            except Exception as error:
                chosen.keep.with_suffix(f".{suffix}").write_bytes(content)
                sys.exit(f"case {index} of seed {chosen.seed} ({suffix}): {type(error).__name__}: {error}")
    for suffix in sorted({suffix for suffix, _ in counts}):
        print(f"{suffix:5} {counts[suffix, 'pixels']:8} read {counts[suffix, 'refused']:8} refused")
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - at_start) / 1024
    print(f"{chosen.cases} cases in {time.monotonic() - began:.0f} s, at most {memory:.0f} MiB more memory; no fault")


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
