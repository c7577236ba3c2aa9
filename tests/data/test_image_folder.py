"""Folders of images: every kind of picture, damaged ones, and the cache."""

import numpy as np
import pytest
import torch
from PIL import Image

import cps
from cps.data import decode as decoding
from cps.data import image_folder as folders
from cps.data.decode import ImageError, decode_image
from cps.data.image_folder import read_folder


def picture(width=12, height=8, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.fixture
def shipment(tmp_path):
    for name, number in (("bolt", 3), ("nut", 2)):
        (tmp_path / name).mkdir()
        for index in range(number):
            picture(seed=index).save(tmp_path / name / f"{index}.png")
    (tmp_path / "bolt" / "notes.txt").write_text("not an image")
    (tmp_path / ".hidden").mkdir()
    return tmp_path


def test_a_folder_becomes_one_tensor_of_bytes_with_the_names_of_its_classes(shipment):
    read = read_folder(shipment, size=8)
    assert read.images.shape == (5, 3, 8, 8)
    assert read.images.dtype == torch.uint8
    assert read.labels == ["bolt"] * 3 + ["nut"] * 2
    assert read.paths[3] == "nut/0.png"
    assert read.classes == ["bolt", "nut"]
    task = cps.Task(read.classes, train=(read.images, read.labels))
    assert task.classes == ("bolt", "nut")
    assert repr(read) == "FolderImages(5 x 3 x 8 x 8, classes 'bolt', 'nut'; 0 skipped)"


def test_a_picture_of_the_right_size_keeps_its_pixels(tmp_path):
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
def test_every_kind_of_picture_becomes_plain_colour(tmp_path, kind):
    make, suffix, value = KINDS[kind]
    make().save(tmp_path / f"a.{suffix}")
    pixels = decode_image(tmp_path / f"a.{suffix}", 8)
    assert pixels.shape == (3, 8, 8)
    assert abs(pixels.astype(int) - value).max() <= 3


def test_pictures_of_floating_point_from_0_to_1_are_scaled(tmp_path):
    Image.fromarray(np.full((8, 8), 0.4, dtype=np.float32)).save(tmp_path / "a.tif")
    assert abs(decode_image(tmp_path / "a.tif", 8).astype(int) - 102).max() <= 1


def test_a_file_of_another_format_is_refused_whatever_it_is_called(tmp_path):
    """Pillow would hand PostScript to another program."""
    picture().save(tmp_path / "a.eps")
    (tmp_path / "a.eps").rename(tmp_path / "a.png")
    with pytest.raises(ImageError, match="not an image of a known kind"):
        decode_image(tmp_path / "a.png", 8)


def test_a_large_photograph_is_decoded_at_a_fraction_of_its_size(tmp_path, monkeypatch):
    picture(640, 640).save(tmp_path / "a.jpg")
    picture(640, 640).save(tmp_path / "a.png")
    monkeypatch.setattr(decoding, "LARGEST", 320 * 320)
    assert decode_image(tmp_path / "a.jpg", 8).shape == (3, 8, 8)
    with pytest.raises(ImageError, match="640 x 640 pixels"):
        decode_image(tmp_path / "a.png", 8)


def test_the_first_frame_of_an_animation_counts(tmp_path):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("black", "white")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert decode_image(tmp_path / "a.gif", 8).max() == 0


def test_a_rotated_photograph_is_turned_upright(tmp_path):
    upright = Image.new("RGB", (8, 8), "black")
    upright.paste("white", (0, 0, 8, 4))  # light above
    exif = Image.Exif()
    exif[0x0112] = 6  # turn a quarter clockwise to see it upright
    upright.rotate(90).save(tmp_path / "a.png", exif=exif)
    pixels = decode_image(tmp_path / "a.png", 8)
    assert pixels[:, :3].min() > 200
    assert pixels[:, 5:].max() < 50


@pytest.mark.parametrize("content", [b"", b"not an image", b"\x89PNG\r\n\x1a\n broken"])
def test_a_damaged_image_is_refused_by_name_or_skipped_as_the_user_chose(shipment, content):
    (shipment / "nut" / "broken.png").write_bytes(content)
    with pytest.raises(ImageError, match=r"nut/broken\.png"):
        read_folder(shipment, size=8)
    read = read_folder(shipment, size=8, skip_damaged=True)
    assert len(read.images) == 5
    assert "broken.png" in read.skipped[0]


def test_a_truncated_image_is_damaged(shipment):
    whole = (shipment / "nut" / "0.png").read_bytes()
    (shipment / "nut" / "0.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ImageError, match=r"nut/0\.png"):
        read_folder(shipment, size=8)


def test_a_huge_image_is_refused_before_it_is_decoded(shipment, monkeypatch):
    monkeypatch.setattr(decoding, "LARGEST", 50)
    with pytest.raises(ImageError, match="12 x 8 pixels"):
        read_folder(shipment, size=8)


def test_a_second_run_takes_the_images_from_the_cache(shipment, tmp_path_factory, monkeypatch):
    cache = tmp_path_factory.mktemp("cache")
    first = read_folder(shipment, size=8, cache=cache)
    monkeypatch.setattr(folders, "decode_image", lambda *_: pytest.fail("decoded again"))
    second = read_folder(shipment, size=8, cache=cache)
    assert torch.equal(first.images, second.images)
    assert first.labels == second.labels
    assert first.paths == second.paths


def test_the_cache_is_keyed_by_content_size_and_survives_damage(shipment, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    first = read_folder(shipment, size=8, cache=cache)
    picture(seed=99).save(shipment / "nut" / "0.png")
    changed = read_folder(shipment, size=8, cache=cache)
    assert not torch.equal(first.images, changed.images)
    assert read_folder(shipment, size=4, cache=cache).images.shape[-1] == 4
    assert len(list(cache.iterdir())) == 3
    for file in cache.iterdir():
        file.write_bytes(file.read_bytes()[:50])
    assert torch.equal(read_folder(shipment, size=8, cache=cache).images, changed.images)


def test_progress_is_told(shipment):
    seen = []
    read_folder(shipment, size=8, watch=lambda done, total: seen.append((done, total)))
    assert seen == [(index, 5) for index in range(1, 6)]


def test_one_image_is_read_as_those_of_a_folder(shipment):
    read = read_folder(shipment, size=8)
    for path, image in zip(read.paths, read.images, strict=True):
        assert torch.equal(cps.read_image(shipment / path, size=8), image)
    with pytest.raises(cps.ImageError, match="there is no file"):
        cps.read_image(shipment / "nothing.png", size=8)


def test_folders_without_classes_or_images_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_folder(tmp_path / "nowhere", size=8)
    with pytest.raises(ValueError, match="no folders in it"):
        read_folder(tmp_path, size=8)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="'empty' holds no image"):
        read_folder(tmp_path, size=8)


def test_a_cache_that_cannot_be_written_is_only_a_warning(shipment, caplog, monkeypatch):
    def full(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(folders.storage, "write", full)
    assert len(read_folder(shipment, size=8, cache=shipment / "cache").images) == 5
    assert "the disk is full" in caplog.text


def test_a_task_of_a_folder_is_decoded_when_it_is_learned(shipment, make_learner):
    seen = []
    folder = cps.ImageFolder(shipment, size=8, watch=lambda done, total: seen.append((done, total)))
    scenario = cps.split_by_class(folder, folder, sizes=2)
    assert seen == []
    assert folder[0][1] == "bolt"
    learner = make_learner(cps.SmallConvNet(3, (4, 4, 4)))
    learner.learn(scenario[0])
    assert seen[-1] == (5, 5)
    assert folder.read([4]).paths == ["nut/1.png"]
    folder.keep({"nut"})
    assert folder.targets == ["nut", "nut"]


def test_a_margin_is_cut_off_all_around(tmp_path):
    pixels = np.zeros((8, 8, 3), dtype=np.uint8)
    pixels[2:6, 2:6] = 200
    Image.fromarray(pixels).save(tmp_path / "a.png")
    assert (decode_image(tmp_path / "a.png", 4, margin=1.0) == 200).all()
