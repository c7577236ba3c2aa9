"""Forgetting and renaming in a model file: the names in all notes follow."""

import shutil

import pytest

import cps
from cps.app.edit_model import find_class, forget_class, forget_task, rename_class
from cps.app.inspect import verify
from cps.app.learn_folder import checkpoint_path
from samples import write_image_folder


@pytest.fixture
def model(learner, tmp_path):
    """Return a model of two tasks, with notes in which each class is confused with one of the other task."""
    path = tmp_path / "model.cps"
    learner.save(path)
    learner = cps.load(path, fabric=learner.fabric)
    for task, (own, other) in enumerate(zip(learner.classes, reversed(learner.classes), strict=True)):
        notes = {
            "classes": dict.fromkeys(own, 12),
            "confusion": {name: {name: 1, other[0]: 2} for name in own},
            "image digests": dict.fromkeys(own, "AAAAAAAA"),
            "additions": [{"folder": "march", "classes": dict.fromkeys(own, 3)}],
            "images": 24,
            "shipment": "0" * 64,
        }
        learner.annotate(task, **notes)
    learner.save(path)
    return path


def test_a_forgotten_class_is_in_no_note_and_nothing_else_changes(model):
    learner = cps.load(model)
    before, kept = learner.fingerprint(1), dict(learner.network.subnetworks[1].notes)
    forget_class(learner, "bolt", model)
    assert b"bolt" not in model.read_bytes()
    learner = cps.load(model)
    assert learner.classes == [("nut",), ("gear", "spring")]
    notes = learner.network.subnetworks[0].notes
    assert (notes["images"], notes["shipment"]) == (12, None)
    assert notes["confusion"] == {"nut": {"nut": 1, "gear": 2}}
    assert learner.fingerprint(1) == before
    confusion = {name: {name: 1} for name in ("gear", "spring")}
    assert learner.network.subnetworks[1].notes == {**kept, "confusion": confusion}
    assert len(verify(model)) == 5


def test_a_forgotten_task_is_in_no_note_and_its_checkpoint_is_gone(model):
    checkpoint_path(model).write_bytes(b"of an interrupted run")
    assert forget_task(cps.load(model), 0, model)
    content = model.read_bytes()
    assert b"bolt" not in content
    assert b"nut" not in content
    assert not checkpoint_path(model).exists()


def test_a_renamed_class_has_its_new_name_in_all_notes(model):
    rename_class(cps.load(model), "bolt", "screw", model)
    assert b"bolt" not in model.read_bytes()
    tasks = cps.load(model).network.subnetworks
    assert tasks[0].classes == ("screw", "nut")
    assert tasks[0].notes["confusion"]["screw"] == {"screw": 1, "gear": 2}
    assert tasks[1].notes["confusion"]["gear"] == {"gear": 1, "screw": 2}
    assert tasks[0].notes["additions"] == [{"folder": "march", "classes": {"screw": 3, "nut": 3}}]


def test_a_name_that_stays_in_another_version_stays_in_the_notes(model, tmp_path):
    learner = cps.load(model)
    images = cps.read_folder(write_image_folder(tmp_path / "more", ["bolt", "washer"], images=4), size=8)
    learner.learn(cps.Task(["bolt", "washer"], train=(images.images, images.labels)), new_versions=True)
    learner.save(model)
    forget_task(learner, 0, model)
    assert learner.network.subnetworks[0].notes["confusion"]["gear"] == {"gear": 1, "bolt": 2}


def test_numbers_are_found_by_their_text(model, make_learner):
    learner = cps.load(shutil.copy(model, model.with_name("copy.cps")))
    learner.rename("bolt", 7)
    assert find_class(learner, "7") == 7
    with pytest.raises(ValueError, match="no task has learned the class 'gaer'; did you mean 'gear'"):
        find_class(learner, "gaer")
