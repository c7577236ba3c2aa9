"""Scanning a folder: counts, digests, held-out images and warnings."""

import shutil

import numpy as np
import pytest
from PIL import Image

from cps.app.folder_scan import scan_folder
from cps.data.decode import ImageError
from samples import write_image_folder


def test_a_scan_counts_measures_and_hashes_the_images(tmp_path):
    progress = []
    folder = write_image_folder(tmp_path / "january", ["nut", "bolt"], size=10)
    scan = scan_folder(folder, on_progress=lambda *at: progress.append(at))
    assert scan.counts == {"bolt": 12, "nut": 12}
    assert scan.sample.side == 10
    assert not scan.sample.is_grey
    assert progress[-1] == ("scanning images", 24, 24, "")
    moved = shutil.copytree(folder, tmp_path / "other")
    (moved / "nut" / "3.png").rename(moved / "nut" / "renamed.png")
    assert scan_folder(moved).digest == scan.digest
    (moved / "nut" / "4.png").unlink()
    assert scan_folder(moved).digest != scan.digest


def test_grey_images_are_recognised_although_jpeg_rounds(tmp_path):
    (tmp_path / "a").mkdir()
    grey = np.random.default_rng(0).integers(0, 256, (16, 16), dtype=np.uint8)
    for index in range(3):
        Image.fromarray(grey).convert("RGB").save(tmp_path / "a" / f"{index}.jpg")
    assert scan_folder(tmp_path).sample.is_grey


def test_a_tenth_of_each_class_is_held_out_and_copies_stay_together(tmp_path):
    folder = write_image_folder(tmp_path / "january", ["bolt", "nut"], images=30)
    write_image_folder(folder, ["rare"], images=4)
    for index in range(30):
        shutil.copy(folder / "nut" / f"{index}.png", folder / "nut" / f"copy{index}.png")
    scan = scan_folder(folder)
    held_out = scan.held_out(0.1)
    names = [scan.files[index].parent.name for index in held_out]
    assert {name: names.count(name) for name in scan.counts} == {"bolt": 3, "nut": 12, "rare": 0}
    training = {scan.digests[index] for index in range(len(scan.files)) if index not in held_out}
    assert not training & {scan.digests[index] for index in held_out}
    assert scan.held_out(0.0) == set()
    assert scan_folder(folder).held_out(0.1) == held_out


def test_small_classes_and_images_in_two_classes_cause_warnings(tmp_path):
    folder = write_image_folder(tmp_path / "january", ["bolt", "nut"], images=20)
    assert scan_folder(folder).warnings() == []
    write_image_folder(folder, ["rare"], images=3)
    shutil.copy(folder / "bolt" / "7.png", folder / "nut" / "same.png")
    small, shared = scan_folder(folder).warnings()
    assert "'rare' has only 3 image(s)" in small
    assert "'bolt' and 'nut' share 1 identical image(s), for example 'nut/same.png'" in shared


def test_a_folder_of_damaged_images_is_rejected(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.png").write_bytes(b"broken")
    with pytest.raises(ImageError, match=r"0\.png"):
        scan_folder(tmp_path)
