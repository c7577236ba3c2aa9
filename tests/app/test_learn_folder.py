"""Learning folders into a model file: a kill at any moment loses nothing, and one program at a time may change it."""

import multiprocessing
import os
import shutil
import signal
import unicodedata
from pathlib import Path

import pytest

import cps
from cps.app import learn_folder as module
from cps.app.autoconfig import Options
from cps.app.folder_scan import scan_folder
from cps.app.learn_folder import (
    checkpoint_path,
    decode_images,
    learn_folder,
    make_plan,
    similar_image_warnings,
)
from cps.storage.lock import LockedError, locked
from cps.training import checkpoint
from samples import write_image_folder

OPTIONS = Options(epochs=4, batch_size=8)


def learn(folder, model, *, options=OPTIONS, hold_out=0.1, **settings):
    scan = scan_folder(folder)
    fabric = cps.make_fabric(accelerator="cpu")
    with locked(model):
        plan = make_plan(model, scan, options, fabric, **settings)
        if plan.learned_as is not None:
            return None
        return learn_folder(plan, decode_images(plan), hold_out=hold_out)


def plan_for(model, folder, options=OPTIONS, **settings):
    return make_plan(model, scan_folder(folder), options, cps.make_fabric(accelerator="cpu"), **settings)


def fingerprints(model):
    learner = cps.load(model, fabric=cps.make_fabric(accelerator="cpu"))
    return [each.digest_in(learner.network.weights, {}) for each in learner.network.subnetworks]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a folder with two folders of images, a model of the first and one of both, and what was learned."""
    root = tmp_path_factory.mktemp("models")
    first = write_image_folder(root / "january", ["bolt", "nut"])
    second = write_image_folder(root / "february", ["gear", "spring"])
    learned = [learn(first, root / "one.cps")]
    shutil.copy(root / "one.cps", root / "two.cps")
    learned.append(learn(second, root / "two.cps", options=Options()))
    return root, learned


def test_a_second_folder_is_learned_with_the_stored_settings_and_changes_no_earlier_task(models):
    root, _ = models
    assert fingerprints(root / "two.cps")[0] == fingerprints(root / "one.cps")[0]
    learner = cps.load(root / "two.cps")
    assert learner.config.train.epochs == 4
    assert learner.network.subnetworks[1].classes == ("gear", "spring")


def test_notes_contain_the_name_of_the_folder_but_no_path(models):
    root, learned = models
    notes = cps.load(root / "two.cps").network.subnetworks[1].notes
    assert notes == learned[1].notes
    assert notes["folder"] == "february"
    assert notes["classes"] == {"gear": 12, "spring": 12}
    assert (notes["images"], notes["held out"]) == (24, 2)
    assert set(notes["accuracy"]) == {"task known", "task found"}
    assert notes["cps"] == cps.__version__
    assert str(root).encode() not in (root / "two.cps").read_bytes()


def test_a_new_version_of_a_class_is_not_compared_with_learned_classes(models, tmp_path, monkeypatch):
    folder = write_image_folder(tmp_path / "march", ["bolt", "washer"])
    plan = plan_for(models[0] / "one.cps", folder, Options(), as_version=True)
    compared = []

    def record(learner, images, labels):
        compared.extend([len(images), *labels])
        return []

    monkeypatch.setattr(module, "find_similar_images", record)
    assert similar_image_warnings(plan, decode_images(plan)) == []
    assert compared == [12, *["washer"] * 12]


def test_nothing_is_left_beside_the_model(models):
    names = {path.name for path in models[0].iterdir()}
    assert names == {"january", "february", "one.cps", "two.cps"}


def test_images_that_were_learned_before_are_recognised_and_a_stale_checkpoint_is_removed(models, tmp_path):
    model = shutil.copy(models[0] / "two.cps", tmp_path / "model.cps")
    checkpoint_path(model).write_bytes(b"left by a kill")
    plan = plan_for(model, models[0] / "february", Options())
    assert plan.learned_as == 1
    assert not checkpoint_path(model).exists()


def test_a_learned_class_is_rejected_or_learned_as_a_new_version(models, tmp_path):
    model = shutil.copy(models[0] / "one.cps", tmp_path / "model.cps")
    folder = write_image_folder(tmp_path / "march", ["bolt", "washer"], seed=3)
    with pytest.raises(ValueError, match=r"'bolt' was already learned in task 1; .* --as-version .* 'bolt \(2\)'"):
        learn(folder, model)
    learn(folder, model, as_version=True)
    assert cps.load(model).network.subnetworks[1].classes == ("bolt (2)", "washer")
    again = write_image_folder(tmp_path / "april", ["bolt", "pin"], seed=4)
    learn(again, model, as_version=True)
    assert cps.load(model).network.subnetworks[2].classes == ("bolt (3)", "pin")
    both = write_image_folder(tmp_path / "may", ["bolt", "bolt (4)"], seed=5)
    with pytest.raises(ValueError, match="have the same class name"):
        learn(both, model, as_version=True)


def test_options_cannot_change_what_a_model_was_created_with(models, tmp_path):
    folder = write_image_folder(tmp_path / "march", ["pin", "washer"])
    for options, message in (
        (Options(size=16), "is 8 pixels and cannot be changed to 16"),
        (Options(backbone="resnet32"), "is small and cannot be changed to resnet32"),
        (Options(pretrained=True), "only a new model"),
        (Options(seed=5), "is 0 and cannot be changed to 5"),
    ):
        with pytest.raises(ValueError, match=message):
            plan_for(models[0] / "one.cps", folder, options)
    options = Options(size=8, backbone="small", epochs=7, batch_size=3, augment="none", alpha=0.6)
    config = plan_for(models[0] / "one.cps", folder, options).learner.config
    assert (config.train.epochs, config.retrain.epochs) == (7, 3)
    assert config.retrain.batch_size == 3
    assert config.augment is None
    assert config.pruner == cps.NNrelief(0.6)


def test_notes_of_another_form_are_ignored(models, tmp_path):
    learner = cps.load(models[0] / "one.cps", fabric=cps.make_fabric(accelerator="cpu"))
    learner.annotate(0, **{"usual output": "much", "accuracy": 0.9, "shipment": 3})
    learner.save(tmp_path / "model.cps")
    plan = plan_for(tmp_path / "model.cps", models[0] / "february", Options())
    assert similar_image_warnings(plan, decode_images(plan)) == []


def test_a_single_class_is_learned_in_four_rotations_and_later_classes_are_not(models, tmp_path):
    model = Path(shutil.copy(models[0] / "one.cps", tmp_path / "model.cps"))
    before = cps.load(model).fingerprint(0)
    learn(write_image_folder(tmp_path / "march", ["pin"]), model)
    learner = cps.load(model)
    assert learner.network.subnetworks[1].num_rotations == 4
    assert learner.config.rotations == cps.Upright()
    assert learner.fingerprint(0) == before


def test_a_second_program_cannot_change_the_model_at_the_same_time(models):
    with locked(models[0] / "one.cps"), pytest.raises(LockedError, match=r"another program is changing .*one\.cps"):
        learn(models[0] / "february", models[0] / "one.cps")


def test_images_of_a_learned_class_under_another_name_cause_a_warning(tmp_path):
    """The pattern of an image depends on the name of its class, so other images of `bolt` are the same class."""
    root = write_image_folder(tmp_path / "new", ["bolt", "pin"], images=40, seed=3)
    (root / "bolt").rename(root / "screw")
    model = tmp_path / "model.cps"
    old = write_image_folder(tmp_path / "old", ["bolt", "nut"], images=60)
    learn(old, model, options=Options(epochs=6), hold_out=0.4)
    plan = plan_for(model, root, Options())
    found = similar_image_warnings(plan, decode_images(plan))
    assert [warning[:50] for warning in found] == ["images of 'screw' resemble class 'bolt' of task 1;"]


def learn_until(folder, model, fatal):
    """Learn in a separate process, which kills itself just before the `fatal`-th time it syncs or renames a file."""
    checkpoint.MAX_WRITING_SHARE = float("inf")  # such short epochs would write no checkpoints
    steps = []

    def counting(real):
        def wrapped(*arguments, **settings):
            steps.append(real)
            if len(steps) == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **settings)

        return wrapped

    os.fsync, Path.replace, Path.unlink = (counting(real) for real in (os.fsync, Path.replace, Path.unlink))
    learn(folder, model)
    (model.parent / "steps").write_text(str(len(steps)))


@pytest.mark.slow
def test_after_a_kill_at_any_moment_the_model_works_and_learning_resumes(models, tmp_path):
    root, _ = models
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["cps.app.learn_folder", "lightning_fabric", "hypothesis", "torch._dynamo"])
    model = tmp_path / "model.cps"
    old, new = fingerprints(root / "one.cps"), fingerprints(root / "two.cps")

    def run(fatal):
        child = server.Process(target=learn_until, args=(root / "february", model, fatal))
        child.start()
        child.join()
        return child.exitcode

    shutil.copy(root / "one.cps", model)
    assert run(None) == 0
    steps = int((tmp_path / "steps").read_text())
    assert fingerprints(model) == new
    for fatal in (1, steps // 2, steps - 3, steps - 1):  # the last two: before and after the model is replaced
        shutil.copy(root / "one.cps", model)
        assert run(fatal) == -signal.SIGKILL
        assert fingerprints(model) in (old, new)
        assert run(None) == 0
        assert fingerprints(model) == new
        left = {path.name for path in tmp_path.iterdir() if path.suffix != ".partial"}
        assert left - {".model.cps.lock"} == {"model.cps", "steps"}


def test_only_readable_images_are_held_out(tmp_path):
    """A class with a single readable image keeps it for training."""
    root = write_image_folder(tmp_path / "new", ["bolt", "nut"], images=10)
    scan = scan_folder(root)
    held_out_index = min(scan.held_out(0.1))  # of the first class
    for index, file in enumerate(scan.files):
        if file.parent.name == "bolt" and index != held_out_index:
            file.write_bytes(b"damaged")
    plan = plan_for(tmp_path / "m.cps", root)
    decoded = decode_images(plan, skip_damaged=True)
    assert decoded.labels.count("bolt") == 1
    (_, train), (_, held_out) = module._split(plan, decoded, 0.1)
    assert train.count("bolt") == 1
    assert held_out == ["nut"]


def test_a_decomposed_unicode_name_is_a_new_class_and_not_a_new_version(tmp_path, monkeypatch):
    root = write_image_folder(tmp_path / "new", ["pin", "cafe"])
    (root / "cafe").rename(root / unicodedata.normalize("NFD", "caf\u00e9"))
    plan = plan_for(tmp_path / "m.cps", root)
    compared = []
    monkeypatch.setattr(module, "find_similar_images", lambda learner, images, labels: compared.extend(labels) or [])
    similar_image_warnings(plan, decode_images(plan))
    assert len(set(compared)) == 2
