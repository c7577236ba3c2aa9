"""Uploads: damaged and too large images are rejected, and file names are never used as paths."""

import io
import random

import pytest
from PIL import Image
from served import image_file, post_images

from cps.data import decode
from cps.data.decode import ImageFormat
from cps.serve import uploads
from cps.serve.middleware import Limits


@pytest.mark.slow
def test_damaged_images_never_cause_a_server_error(address):
    rng = random.Random(0)
    statuses = set()
    for index in range(80):
        content = bytearray(image_file(index % 5, kind=("PNG", "JPEG", "WEBP", "TIFF", "GIF")[index % 5]))
        for _ in range(rng.choice((1, 4, 30))):
            content[rng.randrange(len(content))] = rng.randrange(256)
        kept = rng.choice((len(content), rng.randrange(1, len(content))))
        statuses.add(post_images(address, ("x", bytes(content[:kept]))).status_code)
    assert statuses == {200, 415}


def test_file_names_are_never_used_as_paths(address, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("../../model.cps", "/etc/passwd", "a\\b", "x" * 5000, "é\n\"'<script>"):
        reply = post_images(address, (name, image_file(1)))
        assert reply.status_code in (200, 400), name
        if reply.status_code == 200:
            assert len(reply.json()["images"][0]["file"]) <= 200
    assert list(tmp_path.iterdir()) == []


def test_the_pixel_limit_of_the_decoder_holds_whatever_the_server_allows(monkeypatch):
    monkeypatch.setattr(decode, "MAX_PIXELS", 2_000_000)
    monkeypatch.setattr(uploads, "MAX_PIXELS", 2_000_000)
    large = io.BytesIO()
    Image.new("L", (2000, 1500)).save(large, "PNG")
    with pytest.raises(decode.ImageError, match="has 2000 x 1500 pixels, more than 2 million: send a smaller image"):
        uploads.decode_upload(uploads.Upload("large.png", large.getvalue()), ImageFormat(8), Limits(megapixels=100))
