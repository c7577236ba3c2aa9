"""Decoding: every kind of image becomes RGB bytes, damaged files raise `ImageError` and nothing else."""

from collections import Counter

import numpy as np
import pytest
from fuzz.images import make_cases, outcome, seed_files
from PIL import Image

from cps.data import decode
from cps.data.decode import ImageError, decode_image


def picture(width=12, height=8, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def test_an_image_of_the_right_size_keeps_its_pixels(tmp_path):
    picture(8, 8).save(tmp_path / "a.png")
    pixels = decode_image(tmp_path / "a.png", 8)
    assert np.array_equal(pixels, np.asarray(picture(8, 8)).transpose(2, 0, 1))


def grey(values, mode):
    return Image.fromarray(values.astype(np.uint16)) if mode == "I;16" else Image.fromarray(values.astype(np.uint8))


KINDS = {
    "grey": (lambda: grey(np.full((8, 8), 100), "L"), "png", 100),
    "16 bit": (lambda: grey(np.full((8, 8), 100 * 257), "I;16"), "png", 100),
    "palette": (lambda: Image.new("RGB", (8, 8), (100, 100, 100)).convert("P"), "gif", 100),
    "transparent": (lambda: Image.new("RGBA", (8, 8), (0, 0, 0, 0)), "png", 255),
    "black and white": (lambda: Image.new("1", (8, 8), 1), "png", 255),
    "CMYK": (lambda: Image.new("CMYK", (8, 8), (0, 0, 0, 155)), "jpg", 100),
    "webp": (lambda: Image.new("RGB", (8, 8), (100, 100, 100)), "webp", 100),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_image_becomes_rgb(tmp_path, kind):
    make, suffix, value = KINDS[kind]
    make().save(tmp_path / f"a.{suffix}")
    pixels = decode_image(tmp_path / f"a.{suffix}", 8)
    assert pixels.shape == (3, 8, 8)
    assert abs(pixels.astype(int) - value).max() <= 3


def test_float_images_from_0_to_1_are_scaled(tmp_path):
    Image.fromarray(np.full((8, 8), 0.4, dtype=np.float32)).save(tmp_path / "a.tif")
    assert abs(decode_image(tmp_path / "a.tif", 8).astype(int) - 102).max() <= 1


def test_an_unsupported_format_is_rejected_whatever_the_suffix(tmp_path):
    """Pillow would hand PostScript to another program."""
    picture().save(tmp_path / "a.eps")
    (tmp_path / "a.eps").rename(tmp_path / "a.png")
    with pytest.raises(ImageError, match="not an image in a supported format"):
        decode_image(tmp_path / "a.png", 8)


def test_a_large_jpeg_is_decoded_at_a_reduced_size(tmp_path, monkeypatch):
    picture(640, 640).save(tmp_path / "a.jpg")
    picture(640, 640).save(tmp_path / "a.png")
    monkeypatch.setattr(decode, "MAX_PIXELS", 320 * 320)
    assert decode_image(tmp_path / "a.jpg", 8).shape == (3, 8, 8)
    with pytest.raises(ImageError, match="640 x 640 pixels"):
        decode_image(tmp_path / "a.png", 8)


def test_an_animation_is_read_as_its_first_frame(tmp_path):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("black", "white")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert decode_image(tmp_path / "a.gif", 8).max() == 0


def test_the_exif_orientation_is_applied(tmp_path):
    upright = Image.new("RGB", (8, 8), "black")
    upright.paste("white", (0, 0, 8, 4))  # the upper half
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees clockwise
    upright.rotate(90).save(tmp_path / "a.png", exif=exif)
    pixels = decode_image(tmp_path / "a.png", 8)
    assert pixels[:, :3].min() > 200
    assert pixels[:, 5:].max() < 50


def test_a_margin_is_cropped_on_all_sides(tmp_path):
    pixels = np.zeros((8, 8, 3), dtype=np.uint8)
    pixels[2:6, 2:6] = 200
    Image.fromarray(pixels).save(tmp_path / "a.png")
    assert (decode_image(tmp_path / "a.png", 4, margin=1.0) == 200).all()


# A short part of fuzz/images.py: the same few hundred damaged files in every run.


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_image_is_read_or_rejected_and_nothing_else(tmp_path, seed):
    found = Counter()
    for suffix, content in make_cases(200, 1000 + seed):
        path = tmp_path / f"case.{suffix}"
        path.write_bytes(content)
        found[outcome(path)] += 1
    assert min(found["pixels"], found["refused"]) > 20


def test_every_undamaged_seed_image_of_the_fuzzer_is_read(tmp_path):
    for suffix, content in seed_files():
        path = tmp_path / f"whole.{suffix}"
        path.write_bytes(content)
        assert outcome(path) == "pixels", suffix


def test_negative_control_a_decoder_that_raises_something_else_is_found(tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(b"broken")
    monkeypatch.setattr(decode, "ImageError", KeyError)
    with pytest.raises(KeyError):
        outcome(tmp_path / "a.png")
