"""The estimate of time and memory."""

import pytest

import cps
from cps.app.autoconfig import Options, trunk_settings
from cps.app.estimate import Measured, estimate
from cps.app.folder_scan import scan_folder
from cps.app.learn_folder import make_plan
from cps.config import LearnerConfig
from samples import conv_net, write_image_folder


def test_the_estimate_grows_with_the_number_of_images_and_changes_nothing(tmp_path, fabric):
    folder = write_image_folder(tmp_path / "january", ["bolt", "nut"])
    learner = make_plan(tmp_path / "model.cps", scan_folder(folder), Options(epochs=2), fabric).learner
    before = {name: value.clone() for name, value in learner.network.weights.items()}
    few, many = (estimate(learner, 8, images, 2, learner.config.rotations) for images in (100, 100_000))
    assert 0 < few.seconds < many.seconds / 100
    assert 0 < few.memory < many.memory
    assert all((learner.network.weights[name] == value).all() for name, value in before.items())
    assert learner.network.subnetworks == []


def new_learner_behind_trunk(fabric):
    settings = trunk_settings(12, batch_size=8)
    return cps.Learner(conv_net(3), trunk="2", map_copies=4, fabric=fabric, **settings)


def test_more_copies_and_images_behind_a_trunk_take_longer(fabric):
    learner = new_learner_behind_trunk(fabric)
    few, many = (estimate(learner, 8, images, 2, learner.config.rotations) for images in (100, 100_000))
    assert 0 < few.seconds < many.seconds / 100
    assert 0 < few.memory < many.memory
    assert learner.network.subnetworks == []


def test_as_many_epochs_are_trained_as_fit_into_the_time():
    config = LearnerConfig(**trunk_settings(12), map_copies=4)
    measured = Measured(tasks=0, seconds_per_map=0.5, seconds_per_image=1.0, map_bytes=1, activations=1, weights=1)
    # 100 images: 4 maps of 0.5 s each, and passes of 1 s: the epochs, half as many again, 4 for pruning, 0.3 at the end
    assert measured.affordable_epochs(config, 100, 1e9) == 12
    assert measured.affordable_epochs(config, 100, 100 * (2 + 8 + 4 + 4 + 0.3)) == 8
    assert measured.affordable_epochs(config, 100, 100 * (2 + 8 + 4 + 4 + 0.2)) == 7
    with pytest.raises(ValueError, match="training takes at least 14 min for these images, longer than the time given"):
        measured.affordable_epochs(config, 100, 100)
