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
    learn_folder,
    make_plan,
    read_images,
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
        return learn_folder(plan, read_images(plan), hold_out=hold_out)


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
    assert set(notes["confusion"]) == {"gear", "spring"}
    assert notes["folder"] == "february"
    assert notes["classes"] == {"gear": 12, "spring": 12}
    assert (notes["images"], notes["held out"]) == (24, 2)
    assert set(notes["accuracy"]) == {"task known", "task found"}
    assert notes["cps"] == cps.__version__
    assert str(root).encode() not in (root / "two.cps").read_bytes()


def test_known_classes_are_not_compared_with_learned_classes(models, tmp_path, monkeypatch):
    folder = write_image_folder(tmp_path / "march", ["bolt", "washer"], seed=4)
    plan = plan_for(models[0] / "one.cps", folder, Options())
    compared = []

    def record(learner, evidence_of, labels):
        compared.extend([evidence_of(list(range(len(labels)))).num_images, *labels])
        return []

    monkeypatch.setattr(module, "find_similar_images", record)
    assert similar_image_warnings(plan, read_images(plan)) == []
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


def test_trained_tasks_learn_new_versions_of_known_classes(models, tmp_path):
    model = shutil.copy(models[0] / "one.cps", tmp_path / "model.cps")
    before = cps.load(model).fingerprint(0)
    learned = learn(write_image_folder(tmp_path / "march", ["bolt", "washer"], seed=3), model)
    assert (learned.task, learned.added) == (1, {})
    assert learn(write_image_folder(tmp_path / "april", ["bolt"], seed=4), model).task == 2
    learner = cps.load(model)
    assert learner.classes == [("bolt", "nut"), ("bolt", "washer"), ("bolt",)]
    assert learner.fingerprint(0) == before
    assert [learner.network.version(task, "bolt") for task in range(3)] == [1, 2, 3]


def test_two_folders_of_one_class_are_refused(models, tmp_path):
    both = write_image_folder(tmp_path / "may", ["cafe", "nut"], seed=5)
    shutil.copytree(both / "cafe", both / unicodedata.normalize("NFC", "caf\u00e9"))
    (both / "cafe").rename(both / unicodedata.normalize("NFD", "caf\u00e9"))
    with pytest.raises(ValueError, match="have the same class name"):
        plan_for(models[0] / "one.cps", both)


def test_images_that_were_learned_before_are_left_out(models, tmp_path):
    folder = shutil.copytree(models[0] / "january", tmp_path / "january")
    more = write_image_folder(tmp_path / "more", ["bolt", "pin"], images=5, seed=6)
    shutil.copytree(more / "pin", folder / "pin")
    shutil.copy(more / "bolt" / "0.png", folder / "bolt" / "new.png")
    plan = plan_for(models[0] / "one.cps", folder)
    assert plan.repeated == 24
    assert plan.classes == {"bolt": "bolt", "pin": "pin"}
    assert plan.known == {"bolt"}
    assert len(plan.scan.files) == 6
    some = write_image_folder(tmp_path / "some", ["bolt"], images=3)
    assert plan_for(models[0] / "one.cps", some).learned_as == 0


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
    assert similar_image_warnings(plan, read_images(plan)) == []


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
    found = similar_image_warnings(plan, read_images(plan))
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
    decoded = read_images(plan, skip_damaged=True)
    assert decoded.labels.count("bolt") == 1
    train, held_out = ([decoded.labels[index] for index in part] for part in module._split(plan, decoded, 0.1))
    assert train.count("bolt") == 1
    assert held_out == ["nut"]


def test_a_decomposed_unicode_name_is_a_new_class_in_its_composed_form(tmp_path):
    root = write_image_folder(tmp_path / "new", ["pin", "cafe"])
    (root / "cafe").rename(root / unicodedata.normalize("NFD", "caf\u00e9"))
    plan = plan_for(tmp_path / "m.cps", root)
    assert plan.known == frozenset()
    assert plan.task_classes == ["caf\u00e9", "pin"]
