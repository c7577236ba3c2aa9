"""The estimate of time and memory."""

from cps.app.autoconfig import Options
from cps.app.estimate import estimate
from cps.app.folder_scan import scan_folder
from cps.app.learn_folder import make_plan
from samples import write_image_folder


def test_the_estimate_grows_with_the_number_of_images_and_changes_nothing(tmp_path, fabric):
    folder = write_image_folder(tmp_path / "january", ["bolt", "nut"])
    learner = make_plan(tmp_path / "model.cps", scan_folder(folder), Options(epochs=2), fabric).learner
    before = {name: value.clone() for name, value in learner.network.weights.items()}
    few, many = (estimate(learner, 8, images, 2, learner.config.rotations) for images in (100, 100_000))
    assert 0 < few.seconds < many.seconds / 100
    assert 0 < few.memory < many.memory
    assert all((learner.network.weights[name] == value).all() for name, value in before.items())
    assert learner.network.subnetworks == []
