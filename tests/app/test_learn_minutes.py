"""`cps learn --minutes`: folders of photos on subnetworks behind a frozen trunk, for as long as the time allows."""

import shutil

import pytest

import cps
from cps.app.autoconfig import FROZEN_METHOD, TRUNK_EPOCHS, Options
from cps.app.folder_scan import scan_folder
from cps.app.learn_folder import can_resume, checkpoint_path, learn_folder, make_plan, read_images
from samples import write_image_folder

NEW = Options(size=16, backbone="small", pretrained=True, batch_size=8, minutes=60)
TOO_SHORT = 1e-5  # minutes, not enough for one epoch


def write(folder, classes, seed):
    return write_image_folder(folder, classes, images=10, size=16, seed=seed)


def plan_of(folder, model, weights=None, **options):
    given = Options(**options) if options or model.exists() else NEW
    return make_plan(model, scan_folder(folder), given, cps.make_fabric(accelerator="cpu"), weights=weights)


@pytest.fixture(scope="module")
def january(tmp_path_factory, weights):
    """Return a folder with a model of bolt and nut, trained behind a trunk."""
    root = tmp_path_factory.mktemp("minutes")
    plan = plan_of(write(root / "january", ["bolt", "nut"], seed=1), root / "model.cps", weights)
    assert not plan.is_frozen
    learn_folder(plan, read_images(plan), hold_out=0)  # so few held-out images would decide by chance
    return root


@pytest.fixture
def model(january, tmp_path):
    """Return a copy of the model that a test may change."""
    return shutil.copy(january / "model.cps", tmp_path / "model.cps")


def load(model):
    return cps.load(model, fabric=cps.make_fabric(accelerator="cpu"))


def test_a_single_class_keeps_the_closed_form_and_two_are_trained(model, tmp_path):
    for classes, is_frozen in ((["pin"], True), (["gear", "ring"], False)):
        plan = plan_of(write(tmp_path / classes[0], classes, seed=2), model, epochs=1)
        methods = [choice for choice in plan.choices if choice.value == FROZEN_METHOD]
        assert (plan.is_frozen, len(methods)) == (is_frozen, is_frozen)
        learn_folder(plan, read_images(plan), hold_out=0)
    learner = load(model)
    assert learner.classes == [("bolt", "nut"), ("pin",), ("gear", "ring")]
    assert [subnetwork.is_frozen for subnetwork in learner.network.subnetworks] == [False, True, False]
    assert learner.network.subnetworks[1].num_rotations == 1


def test_held_out_images_are_added_to_the_sums_after_they_have_measured_the_accuracy(model, tmp_path):
    plan = plan_of(write(tmp_path / "march", ["pin", "gear"], seed=2), model)
    learned = learn_folder(plan, read_images(plan), hold_out=0.2)
    assert (learned.images, learned.held_out) == (20, 4)
    learner = load(model)
    assert learner.network.statistics("Fusion")[1]["shared counts"].tolist() == [10, 10]
    assert learner.network.subnetworks[1].notes["held out"] == 4


def test_more_images_of_one_known_class_are_added_to_its_sums(model, tmp_path):
    plan = plan_of(write(tmp_path / "march", ["nut"], seed=2), model, minutes=1)
    learned = learn_folder(plan, read_images(plan))
    assert (learned.task, learned.added) == (None, {"nut": 10})
    assert load(model).network.statistics("Fusion")[0]["shared counts"].tolist() == [10, 20]


def test_an_interrupted_run_resumes_with_the_epochs_it_began_with_whatever_time_is_left(model, tmp_path):
    folder, whole = write(tmp_path / "march", ["pin", "gear"], seed=2), shutil.copy(model, tmp_path / "whole.cps")

    def stop(activity, done, *_):
        if (activity, done) == ("training", 2):
            raise KeyboardInterrupt

    plan = plan_of(folder, model, minutes=60)
    with pytest.raises(KeyboardInterrupt):
        learn_folder(plan, read_images(plan), on_progress=stop)
    resumed = plan_of(folder, model, minutes=TOO_SHORT)
    assert can_resume(resumed)
    assert resumed.learner.config.train.epochs == TRUNK_EPOCHS
    learn_folder(resumed, read_images(resumed))
    assert not checkpoint_path(model).exists()

    with pytest.raises(ValueError, match="longer than the time given by --minutes"):  # nothing to resume from
        plan_of(folder, whole, minutes=TOO_SHORT)
    plan = plan_of(folder, whole, minutes=60)
    learn_folder(plan, read_images(plan))
    assert load(model).fingerprint(1) == load(whole).fingerprint(1)


def test_a_model_stays_with_what_its_tasks_were_learned_by_unless_minutes_are_given(model, tmp_path):
    folder = write(tmp_path / "march", ["pin", "gear"], seed=2)
    assert not plan_of(folder, model).is_frozen
    assert plan_of(folder, model, minutes=0).is_frozen
    learner = load(model)
    learner.forget(0)
    learner.save(model)
    assert plan_of(folder, model).is_frozen  # as a new model
    assert not plan_of(folder, model, minutes=1).is_frozen
