"""The settings of a new model follow from its images, unless they are given."""

from pathlib import Path

import pytest

import cps
from cps.app.autoconfig import AUGMENTATIONS, GIVEN, TRUNK_EPOCHS, Options, choose_config, make_augmentation
from cps.app.folder_scan import FolderScan, ImageSample
from cps.network.backbones import BUILTINS


def make_scan(images, side, *, is_grey=False):
    files = tuple(Path(f"january/{'ab'[index % 2]}/{index}.png") for index in range(images))
    sample = ImageSample(side, is_grey, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2))
    return FolderScan(Path("january"), files, tuple(str(index) for index in range(images)), sample)


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
def test_size_and_backbone_follow_from_the_images_and_the_device(images, side, has_gpu, size, backbone):
    config = choose_config(make_scan(images, side), Options(), has_gpu=has_gpu)
    assert (config.size, config.backbone.name) == (size, backbone)


def test_more_images_mean_fewer_epochs_and_larger_batches():
    trains = [choose_config(make_scan(n, 32), Options(), has_gpu=False).settings["train"] for n in (50, 1000, 100_000)]
    assert [train.epochs for train in trains] == [40, 32, 10]
    assert [train.batch_size for train in trains] == [16, 32, 64]


def test_grey_images_are_not_flipped():
    grey, colour = (
        choose_config(make_scan(50, 32, is_grey=is_grey), Options(), has_gpu=False) for is_grey in (True, False)
    )
    assert grey.settings["augment"] == cps.PadCrop(4)
    assert colour.settings["augment"] == cps.Chain((cps.PadCrop(4), cps.Flip()))


def test_every_option_is_used_and_marked_as_given():
    options = Options(size=24, backbone="resnet32", epochs=3, batch_size=5, augment="none", alpha=0.5, seed=4)
    config = choose_config(make_scan(50, 32), options, has_gpu=False)
    assert (config.size, config.backbone) == (24, cps.Architecture("resnet32"))
    settings = config.settings
    assert (settings["train"].epochs, settings["train"].batch_size) == (3, 5)
    assert (settings["augment"], settings["pruner"], settings["seed"]) == (None, cps.NNrelief(0.5), 4)
    assert [choice.reason for choice in config.choices] == [GIVEN] * 6
    for name in BUILTINS:
        assert choose_config(make_scan(50, 32), Options(backbone=name), has_gpu=False).backbone.name == name
    assert len({str(make_augmentation(name, 32)) for name in AUGMENTATIONS}) == len(AUGMENTATIONS)


def test_invalid_options_are_rejected():
    with pytest.raises(ValueError, match="unknown augmentation 'spin'; choose from: none"):
        Options(augment="spin")
    with pytest.raises(ValueError, match="unknown backbone 'vgg'"):
        choose_config(make_scan(50, 32), Options(backbone="vgg"), has_gpu=False)


def test_photos_start_from_pretrained_weights_if_there_are_any_and_nothing_else_does():
    photos, grey, tiny = make_scan(50, 300), make_scan(50, 300, is_grey=True), make_scan(50, 32)
    for scan, installed, is_pretrained in [
        (photos, "efficientnet-lite0", True),
        (photos, None, False),
        (grey, "efficientnet-lite0", False),
        (tiny, "efficientnet-lite0", False),
    ]:
        config = choose_config(scan, Options(), has_gpu=False, installed=installed)
        assert (config.is_pretrained, config.is_frozen) == (is_pretrained, is_pretrained)
        assert ("pretrained" in config.warning) == (scan is photos and installed is None)


def test_a_pretrained_model_trains_behind_its_trunk_only_if_there_is_time():
    def choose(options, has_gpu=False):
        return choose_config(make_scan(500, 300), options, has_gpu=has_gpu, installed="efficientnet-lite0")

    frozen, trained, fixed = (choose(options) for options in (Options(), Options(minutes=5), Options(epochs=3)))
    assert [config.is_frozen for config in (frozen, trained, fixed)] == [True, False, False]
    assert [choose(options, has_gpu=True).is_frozen for options in (Options(), Options(minutes=0))] == [False, True]
    assert frozen.settings == trained.settings
    assert trained.settings["train"].epochs == TRUNK_EPOCHS
    assert fixed.settings["train"].epochs == 3
    assert "--minutes" in {choice.name: choice.reason for choice in frozen.choices}["method"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"minutes": 5.0, "epochs": 3}, "--minutes and --epochs both say how long to train"),
        ({"minutes": 5.0, "pretrained": False}, "--minutes is for pretrained backbones"),
        ({"batch_size": 8}, "--batch has no effect on frozen pretrained features; train with --minutes"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        choose_config(make_scan(50, 300), Options(**options), has_gpu=False, installed="efficientnet-lite0")
