"""A shipment is looked at before it is learned: what is held out, what is warned of, what is proposed."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import cps
from cps.app.autoconfig import AUGMENTATIONS, Options, augmentation, propose
from cps.app.estimate import estimate
from cps.app.folder_scan import FolderScan, Sample, look
from cps.app.learn_folder import prepare
from cps.data.decode import ImageError
from cps.network.backbones import BUILTINS
from samples import write_image_folder


def shipment_of(images, side, *, grey=False):
    files = tuple(Path(f"january/{'ab'[index % 2]}/{index}.png") for index in range(images))
    sample = Sample(side, grey, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2))
    return FolderScan(Path("january"), files, tuple(str(index) for index in range(images)), sample)


def test_a_look_counts_measures_and_digests(tmp_path):
    seen = []
    folder = write_image_folder(tmp_path / "january", ["nut", "bolt"], size=10)
    found = look(folder, watch=lambda *at: seen.append(at))
    assert found.counts == {"bolt": 12, "nut": 12}
    assert found.sample.side == 10
    assert not found.sample.is_grey
    assert seen[-1] == ("looking at images", 24, 24, "")
    moved = shutil.copytree(folder, tmp_path / "other")
    (moved / "nut" / "3.png").rename(moved / "nut" / "renamed.png")
    assert look(moved).digest == found.digest
    (moved / "nut" / "4.png").unlink()
    assert look(moved).digest != found.digest


def test_grey_images_are_seen_as_grey_though_jpeg_rounds(tmp_path):
    (tmp_path / "a").mkdir()
    grey = np.random.default_rng(0).integers(0, 256, (16, 16), dtype=np.uint8)
    for index in range(3):
        Image.fromarray(grey).convert("RGB").save(tmp_path / "a" / f"{index}.jpg")
    assert look(tmp_path).sample.is_grey


def test_a_tenth_of_each_class_is_held_out_and_copies_stay_on_one_side(tmp_path):
    folder = write_image_folder(tmp_path / "january", ["bolt", "nut"], images=30)
    write_image_folder(folder, ["rare"], images=4)
    for index in range(30):
        shutil.copy(folder / "nut" / f"{index}.png", folder / "nut" / f"copy{index}.png")
    found = look(folder)
    held = found.held_out(0.1)
    names = [found.files[index].parent.name for index in held]
    assert {name: names.count(name) for name in found.counts} == {"bolt": 3, "nut": 12, "rare": 0}
    kept = {found.digests[index] for index in range(len(found.files)) if index not in held}
    assert not kept & {found.digests[index] for index in held}
    assert found.held_out(0.0) == set()
    assert look(folder).held_out(0.1) == held


def test_few_images_and_images_in_two_classes_are_warned_of(tmp_path):
    folder = write_image_folder(tmp_path / "january", ["bolt", "nut"], images=20)
    assert look(folder).warnings() == []
    write_image_folder(folder, ["rare"], images=3)
    shutil.copy(folder / "bolt" / "7.png", folder / "nut" / "same.png")
    few, twins = look(folder).warnings()
    assert "'rare' has only 3 image(s)" in few
    assert "'bolt' and 'nut' share 1 identical image(s), such as 'nut/same.png'" in twins


def test_a_folder_of_nothing_but_damage_is_refused(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.png").write_bytes(b"broken")
    with pytest.raises(ImageError, match=r"0\.png"):
        look(tmp_path)


@pytest.mark.parametrize(
    ("images", "side", "has_gpu", "size", "backbone"),
    [
        (100, 8, False, 8, "small"),
        (100, 5, False, 8, "small"),
        (400, 32, False, 32, "resnet18-third"),
        (400, 3000, False, 64, "resnet18-third"),
        (400, 3000, True, 224, "resnet18-large"),
        (400, 100, True, 96, "resnet18-large"),
    ],
)
def test_size_and_backbone_follow_the_images_and_the_device(images, side, has_gpu, size, backbone):
    proposal = propose(shipment_of(images, side), Options(), has_gpu=has_gpu)
    assert (proposal.size, proposal.backbone.name) == (size, backbone)


def test_more_images_mean_fewer_epochs_and_larger_batches():
    trains = [propose(shipment_of(n, 32), Options(), has_gpu=False).settings["train"] for n in (50, 1000, 100_000)]
    assert [train.epochs for train in trains] == [40, 32, 10]
    assert [train.batch_size for train in trains] == [16, 32, 64]


def test_grey_images_are_not_mirrored():
    grey, colour = (propose(shipment_of(50, 32, grey=grey), Options(), has_gpu=False) for grey in (True, False))
    assert grey.settings["augment"] == cps.PadCrop(4)
    assert colour.settings["augment"] == cps.Chain((cps.PadCrop(4), cps.Flip()))


def test_every_wish_is_granted_and_shown():
    wishes = Options(size=24, backbone="resnet32", epochs=3, batch_size=5, augment="none", alpha=0.5, seed=4)
    proposal = propose(shipment_of(50, 32), wishes, has_gpu=False)
    assert (proposal.size, proposal.backbone) == (24, cps.Builtin("resnet32"))
    settings = proposal.settings
    assert (settings["train"].epochs, settings["train"].batch_size) == (3, 5)
    assert (settings["augment"], settings["pruner"], settings["seed"]) == (None, cps.NNrelief(0.5), 4)
    assert [choice.why for choice in proposal.choices] == ["asked for"] * 6
    for name in BUILTINS:
        assert propose(shipment_of(50, 32), Options(backbone=name), has_gpu=False).backbone.name == name
    assert len({str(augmentation(name, 32)) for name in AUGMENTATIONS}) == len(AUGMENTATIONS)


def test_wishes_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="no augmentation 'spin'; there are: none"):
        Options(augment="spin")
    with pytest.raises(ValueError, match="no builtin backbone 'vgg'"):
        propose(shipment_of(50, 32), Options(backbone="vgg"), has_gpu=False)
    with pytest.raises(ValueError, match="for the backbone resnet18-large, not for small"):
        propose(shipment_of(50, 32), Options(backbone="small", pretrained=True), has_gpu=False)


def test_the_estimate_grows_with_the_work_and_changes_nothing(tmp_path, fabric):
    folder = write_image_folder(tmp_path / "january", ["bolt", "nut"])
    growth = prepare(tmp_path / "model.cps", look(folder), Options(epochs=2), fabric)
    before = {name: value.clone() for name, value in growth.learner.network.weights.items()}
    few, many = (estimate(growth.learner, 8, images, 2) for images in (100, 100_000))
    assert 0 < few.seconds < many.seconds / 100
    assert 0 < few.memory < many.memory
    assert all((growth.learner.network.weights[name] == value).all() for name, value in before.items())
    assert growth.learner.network.subnetworks == []
