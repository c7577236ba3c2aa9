"""Image folders: classes by folder, damaged files, the cache."""

import numpy as np
import pytest
import torch
from PIL import Image

import cps
from cps.data import decode, image_folder
from cps.data.decode import ImageError
from cps.data.image_folder import read_folder


def picture(width=12, height=8, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.fixture
def folder(tmp_path):
    """Return a folder with three images of class bolt and two of class nut."""
    for name, number in (("bolt", 3), ("nut", 2)):
        (tmp_path / name).mkdir()
        for index in range(number):
            picture(seed=index).save(tmp_path / name / f"{index}.png")
    (tmp_path / "bolt" / "notes.txt").write_text("not an image")
    (tmp_path / ".hidden").mkdir()
    return tmp_path


def test_a_folder_becomes_one_tensor_of_bytes_with_class_names(folder):
    read = read_folder(folder, size=8)
    assert read.images.shape == (5, 3, 8, 8)
    assert read.images.dtype == torch.uint8
    assert read.labels == ["bolt"] * 3 + ["nut"] * 2
    assert read.paths[3] == "nut/0.png"
    assert read.classes == ["bolt", "nut"]
    task = cps.Task(read.classes, train=(read.images, read.labels))
    assert task.classes == ("bolt", "nut")
    assert repr(read) == "FolderImages(5 x 3 x 8 x 8, classes 'bolt', 'nut'; 0 skipped)"


@pytest.mark.parametrize("content", [b"", b"not an image", b"\x89PNG\r\n\x1a\n broken"])
def test_a_damaged_image_raises_with_its_name_or_is_skipped(folder, content):
    (folder / "nut" / "broken.png").write_bytes(content)
    with pytest.raises(ImageError, match=r"nut/broken\.png"):
        read_folder(folder, size=8)
    read = read_folder(folder, size=8, skip_damaged=True)
    assert len(read.images) == 5
    assert "broken.png" in read.skipped[0]


def test_a_truncated_image_is_damaged(folder):
    whole = (folder / "nut" / "0.png").read_bytes()
    (folder / "nut" / "0.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ImageError, match=r"nut/0\.png"):
        read_folder(folder, size=8)


def test_a_huge_image_is_rejected_before_it_is_decoded(folder, monkeypatch):
    monkeypatch.setattr(decode, "MAX_PIXELS", 50)
    with pytest.raises(ImageError, match="12 x 8 pixels"):
        read_folder(folder, size=8)


def test_a_second_run_reads_the_images_from_the_cache(folder, tmp_path_factory, monkeypatch):
    cache = tmp_path_factory.mktemp("cache")
    first = read_folder(folder, size=8, cache=cache)
    monkeypatch.setattr(image_folder, "decode_image", lambda *_: pytest.fail("decoded again"))
    second = read_folder(folder, size=8, cache=cache)
    assert torch.equal(first.images, second.images)
    assert first.labels == second.labels
    assert first.paths == second.paths


def test_the_cache_is_keyed_by_content_and_size_and_survives_damage(folder, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    first = read_folder(folder, size=8, cache=cache)
    picture(seed=99).save(folder / "nut" / "0.png")
    changed = read_folder(folder, size=8, cache=cache)
    assert not torch.equal(first.images, changed.images)
    assert read_folder(folder, size=4, cache=cache).images.shape[-1] == 4
    assert len(list(cache.iterdir())) == 3
    for file in cache.iterdir():
        file.write_bytes(file.read_bytes()[:50])
    assert torch.equal(read_folder(folder, size=8, cache=cache).images, changed.images)


def test_a_cache_that_cannot_be_written_is_only_a_warning(folder, caplog, monkeypatch):
    def full(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(image_folder.container, "write", full)
    assert len(read_folder(folder, size=8, cache=folder / "cache").images) == 5
    assert "the disk is full" in caplog.text


def test_progress_is_reported(folder):
    seen = []
    read_folder(folder, size=8, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(index, 5) for index in range(1, 6)]


def test_one_image_is_read_like_those_of_a_folder(folder):
    read = read_folder(folder, size=8)
    for path, image in zip(read.paths, read.images, strict=True):
        assert torch.equal(cps.read_image(folder / path, size=8), image)
    with pytest.raises(cps.ImageError, match="there is no file"):
        cps.read_image(folder / "nothing.png", size=8)


def test_folders_without_classes_or_images_raise(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_folder(tmp_path / "nowhere", size=8)
    with pytest.raises(ValueError, match="no folders in it"):
        read_folder(tmp_path, size=8)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="'empty' holds no image"):
        read_folder(tmp_path, size=8)


def test_the_images_of_a_task_are_decoded_when_it_is_learned(folder, make_learner):
    seen = []
    images = cps.ImageFolder(folder, size=8, on_progress=lambda done, total: seen.append((done, total)))
    scenario = cps.split_by_class(images, images, sizes=2)
    assert seen == []
    assert images[0][1] == "bolt"
    learner = make_learner(cps.SmallConvNet(3, (4, 4, 4)))
    learner.learn(scenario[0])
    assert seen[-1] == (5, 5)
    assert images.read([4]).paths == ["nut/1.png"]
    images.keep({"nut"})
    assert images.targets == ["nut", "nut"]
