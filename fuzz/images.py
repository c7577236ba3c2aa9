"""Fuzz the image decoder: a damaged image file must give pixels of the right shape or an `ImageError`.

    python fuzz/images.py --cases 50000 --seed 0

Each case is a small valid file with some bytes changed, cut off or repeated, or with large numbers in its header.
Anything but pixels or an `ImageError` ends the run and saves the file as --keep; so does a case that takes too long or
too much memory.
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

SIZE = 8  # pixels a side of the decoded image
MAX_SECONDS = 5.0  # CPU time of one case; most take a millisecond
MAX_MEMORY = 2**30  # bytes in addition to what the process starts with
NUMBERS = [0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]  # for sizes and offsets


def seed_files() -> list[tuple[str, bytes]]:
    """Return small valid image files, with their format: every format that is read, in its common modes and options."""
    pixels = np.random.default_rng(0).integers(0, 256, (13, 17, 4), dtype=np.uint8)
    colour, grey, transparent = (Image.fromarray(pixels[..., part]) for part in (slice(3), 0, slice(4)))
    deep = Image.fromarray(pixels[..., 0].astype(np.uint16) * 257)
    exif = Image.Exif()
    exif[0x0112] = 6
    images = [
        *((name, image, {}) for name in ("png", "tiff", "webp") for image in (colour, grey, transparent)),
        *((name, image, {}) for name in ("jpeg", "bmp", "ppm", "gif") for image in (colour, grey)),
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
        ("webp", colour, {"save_all": True, "append_images": [transparent, grey]}),
        ("gif", colour, {"save_all": True, "append_images": [grey, colour]}),
    ]
    files = []
    for name, image, arguments in images:
        file = io.BytesIO()
        image.save(file, format=name, **arguments)
        files.append((name, file.getvalue()))
    return files


def damage(content: bytes, other: bytes, rng: random.Random) -> bytes:
    """Return the content with one to eight changes; some insert bytes of `other`."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
        at = rng.randrange(len(changed)) if rng.random() < 0.5 else rng.randrange(min(64, len(changed)))
        kind = rng.randrange(7)
        if kind == 0:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            changed[at] = rng.randrange(256)
        elif kind == 2:
            width = rng.choice((1, 2, 4))
            number = rng.choice(NUMBERS) % 256**width
            changed[at : at + width] = number.to_bytes(width, rng.choice(("big", "little")))
        elif kind == 3:
            del changed[max(1, at) :]
        elif kind == 4:
            del changed[at : at + rng.randrange(1, 16)]
        elif kind == 5:
            changed[at:at] = changed[at : at + rng.randrange(1, 64)] * rng.choice((1, 2, 50))
        else:
            start = rng.randrange(len(other))
            changed[at : at + 16] = other[start : start + 16]
        changed = changed or bytearray(b"\0")
    return bytes(changed)


def fix_checksums(content: bytes) -> bytes:
    """Return a PNG file with correct checksums, so that the decoder reads on after checking them."""
    parts, at = [content[:8]], 8
    while at + 12 <= len(content):
        end = at + 8 + int.from_bytes(content[at : at + 4], "big")
        parts += [content[at:end], zlib.crc32(content[at + 4 : end]).to_bytes(4, "big")]
        at = end + 4
    return b"".join([*parts, content[at:]])


def make_cases(number: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Yield `number` damaged files, each with the suffix of its format or, sometimes, of another one.

    They depend on the seed only.
    """
    rng = random.Random(seed)
    files = seed_files()
    for _ in range(number):
        name, content = rng.choice(files)
        suffix, other = rng.choice(files)
        changed = damage(content, other, rng)
        if name == "png" and rng.random() < 0.7:
            changed = fix_checksums(changed)
        yield name if rng.random() < 0.9 else suffix, changed


def outcome(path: Path) -> str:
    """Decode a file; return "pixels" or "refused". Raise for anything else."""
    started = time.process_time()
    try:
        pixels = decode_image(path, SIZE)
        if pixels.shape != (3, SIZE, SIZE) or pixels.dtype != np.uint8:
            raise AssertionError(f"the pixels are {pixels.dtype} {pixels.shape}")
        result = "pixels"
    except ImageError:
        result = "refused"
    seconds = time.process_time() - started
    if seconds > MAX_SECONDS:
        raise AssertionError(f"it took {seconds:.1f} s")
    return result


def main() -> None:
    """Run the cases and print the counts; exit at the first failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path("fuzz-fault"), help="where a failing file is saved")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # Pillow warns about many files that it then rejects
    started, counts = time.monotonic(), Counter()
    at_start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + 4 * MAX_MEMORY, resource.RLIM_INFINITY))
    with TemporaryDirectory() as folder:
        for index, (suffix, content) in enumerate(make_cases(options.cases, options.seed)):
            path = Path(folder) / f"case.{suffix}"
            path.write_bytes(content)
            try:
                counts[suffix, outcome(path)] += 1
                memory = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - at_start)
                if memory > MAX_MEMORY:
                    raise AssertionError(f"decoding takes {memory / 2**20:.0f} MiB")
            except Exception as error:
                options.keep.with_suffix(f".{suffix}").write_bytes(content)
                sys.exit(f"case {index} of seed {options.seed} ({suffix}): {type(error).__name__}: {error}")
    for suffix in sorted({suffix for suffix, _ in counts}):
        print(f"{suffix:5} {counts[suffix, 'pixels']:8} read {counts[suffix, 'refused']:8} refused")
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - at_start) / 1024
    print(
        f"{options.cases} cases in {time.monotonic() - started:.0f} s, at most {memory:.0f} MiB more memory; no failure"
    )


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
