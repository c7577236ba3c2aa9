"""Predicting files, folders and patterns, one by one, in groups and as a stream."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import cps
from cps.app import predict_files as module
from cps.app.predict_files import find_images, group_by_folder, group_by_size, image_format_of, predict_files
from cps.data.decode import ImageFormat
from cps.data.image_folder import read_folder


def test_files_folders_and_patterns_are_found_once_and_in_order(images, monkeypatch):
    monkeypatch.chdir(images)
    (images / "bolt" / ".hidden.png").touch()
    (images / "bolt" / "notes.txt").touch()
    found = find_images(["gear/0.png", "bolt", "*/[01].png"])
    assert [str(path) for path in found] == ["gear/0.png", *(f"bolt/{index}.png" for index in range(6)), "gear/1.png"]
    (images / "with[brackets].png").touch()
    assert find_images(["with[brackets].png"]) == [Path("with[brackets].png")]
    with pytest.raises(FileNotFoundError, match=r"'\*.jpg'"):
        find_images(["*.jpg"])
    (images / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="no image in 'empty'"):
        find_images(["empty"])


def test_files_come_in_natural_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = [
        "cam9/1.png",
        "cam10/1.png",
        "f01.png",
        "f1.png",
        "f2.png",
        "f10.png",
        "f10b3.png",
        "f10b12.png",
        "g.png",
    ]
    for name in expected:
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"x")
    for place in (".", "**/*.png"):
        assert [path.as_posix() for path in find_images([place])] == expected
    groups = group_by_folder(find_images(["cam10", "cam9"]))
    assert [group[0].parent.name for group in groups] == ["cam9", "cam10"]


def test_single_images_get_the_predictions_of_the_learner(learner, images):
    files = find_images([images])
    found = list(predict_files(learner, group_by_size(files, 1)))
    expected = learner.predict(read_folder(images, size=8).images)
    assert [prediction.path for prediction in found] == files
    assert [prediction.label for prediction in found] == expected.classes
    assert [prediction.task for prediction in found] == expected.tasks.tolist()


def test_the_images_of_a_group_share_a_task_and_damaged_ones_are_left_out(learner, images, monkeypatch):
    monkeypatch.setattr(module, "BATCH", 4)  # several batches
    (images / "bolt" / "2.png").write_bytes(b"broken")
    files = find_images([images])
    for groups in (list(group_by_folder(files)), list(group_by_size(files, 6))):
        assert [len(group) for group in groups] == [6, 6]
        found = list(predict_files(learner, groups))
        assert [prediction.path for prediction in found] == files
        assert [bool(prediction.error) for prediction in found] == [index == 2 for index in range(12)]
        assert "bolt/2.png" in found[2].error
        for own in (found[:6], found[6:]):
            assert len({prediction.task for prediction in own if not prediction.error}) == 1
        readable = read_folder(images, size=8, skip_damaged=True).images[:5]
        expected = learner.predict(readable, group_size=5)
        assert [prediction.label for prediction in found[:6] if not prediction.error] == expected.classes


def test_a_group_size_below_one_is_rejected():
    with pytest.raises(ValueError, match="group size must be at least 1, got 0"):
        list(group_by_size([], 0))


def test_a_group_without_a_readable_image_gives_only_errors(learner, tmp_path):
    (tmp_path / "a.png").write_bytes(b"")
    found = list(predict_files(learner, [[tmp_path / "a.png"]]))
    assert found[0].task is None
    assert found[0].error


def test_only_two_batches_are_decoded_ahead(learner, images, monkeypatch):
    decoded = []
    monkeypatch.setattr(module, "BATCH", 2)
    real = ImageFormat.decode
    monkeypatch.setattr(ImageFormat, "decode", lambda self, path: decoded.append(path) or real(self, path))
    predictions = predict_files(learner, group_by_size(find_images([images]), 1), workers=1)
    next(predictions)
    assert len(decoded) <= 4
    assert torch.tensor([prediction.task for prediction in predictions]).numel() == 11


def test_no_batch_exceeds_the_limit_except_for_one_large_group(monkeypatch):
    monkeypatch.setattr(module, "BATCH", 4)
    groups = [[Path(f"{size}-{index}") for index in range(size)] for size in (1, 3, 1, 9, 2, 2)]
    batches = list(module._batches(groups))
    assert [group for batch in batches for group in batch] == groups
    assert [[len(group) for group in batch] for batch in batches] == [[1, 3], [1], [9], [2, 2]]


def test_files_are_cropped_as_the_pretrained_weights_expect(tmp_path):
    """Images of noise, so that the model is not certain of them."""
    draw, fabric = np.random.default_rng(0), cps.make_fabric(accelerator="cpu")
    for index in range(12):
        file = tmp_path / "noise" / "ab"[index % 2] / f"{index}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(file)
    for margin in (0.5, 0.0):
        learner = cps.Learner(cps.Architecture("small", margin=margin), fabric=fabric)
        read = read_folder(tmp_path / "noise", size=8, margin=margin)
        learner.learn_frozen(cps.Task(read.classes, train=(read.images, read.labels)))
        learner.save(tmp_path / "model.cps")
        learner = cps.load(tmp_path / "model.cps", fabric=fabric)
        assert image_format_of(learner) == ImageFormat(8, margin)
        (found,) = predict_files(learner, [[file]])
        same, other = (
            float(learner.predict(cps.read_image(file, size=8, margin=each)[None]).confidence) for each in (margin, 0.9)
        )
        assert found.confidence == pytest.approx(same)
        assert found.confidence != pytest.approx(other)
