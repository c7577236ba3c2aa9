"""A model file grows by shipments: killed anywhere it loses nothing, and one learner at a time may change it."""

import errno
import multiprocessing
import os
import shutil
import signal
import unicodedata
from pathlib import Path

import pytest
import torch

import cps
from cps.app import learn_folder as growing
from cps.app import similar_classes as resemblance
from cps.app.autoconfig import Options
from cps.app.folder_scan import look
from cps.storage import lock
from cps.storage.lock import LockedError, locked
from cps.training import checkpoint
from samples import make_task, write_image_folder

WISHES = Options(epochs=4, batch_size=8)


def learn(folder, model, *, wishes=WISHES, share=0.1, **settings):
    shipment = look(folder)
    fabric = cps.make_fabric(accelerator="cpu")
    with locked(model):
        growth = growing.prepare(model, shipment, wishes, fabric, **settings)
        if growth.done is not None:
            return None
        return growing.learn(growth, growing.decode(growth), share=share)


def fingerprints(model):
    learner = cps.load(model, fabric=cps.make_fabric(accelerator="cpu"))
    return [each.digest_in(learner.network.weights) for each in learner.network.subnetworks]


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    """Return two shipments, a model of the first, one of both, and what was learned."""
    root = tmp_path_factory.mktemp("grown")
    first = write_image_folder(root / "january", ["bolt", "nut"])
    second = write_image_folder(root / "february", ["gear", "spring"])
    learned = [learn(first, root / "one.cps")]
    shutil.copy(root / "one.cps", root / "two.cps")
    learned.append(learn(second, root / "two.cps", wishes=Options()))
    return root, learned


def test_a_second_shipment_is_learned_with_the_settings_of_the_first_and_changes_nothing_old(grown):
    root, _ = grown
    assert fingerprints(root / "two.cps")[0] == fingerprints(root / "one.cps")[0]
    learner = cps.load(root / "two.cps")
    assert learner.train.epochs == 4
    assert learner.network.subnetworks[1].classes == ("gear", "spring")


def test_notes_say_when_and_from_what_a_task_was_learned_but_not_where(grown):
    root, learned = grown
    notes = cps.load(root / "two.cps").network.subnetworks[1].notes
    assert notes == learned[1].notes
    assert notes["folder"] == "february"
    assert notes["classes"] == {"gear": 12, "spring": 12}
    assert (notes["images"], notes["held out"]) == (24, 2)
    assert set(notes["accuracy"]) == {"task known", "task found"}
    assert notes["cps"] == cps.__version__
    assert str(root).encode() not in (root / "two.cps").read_bytes()


def test_a_new_version_of_a_class_is_meant_to_look_like_it(grown, tmp_path, monkeypatch):
    folder, fabric = write_image_folder(tmp_path / "march", ["bolt", "washer"]), cps.make_fabric(accelerator="cpu")
    growth = growing.prepare(grown[0] / "one.cps", look(folder), Options(), fabric, as_version=True)
    monkeypatch.setattr(growing, "lookalikes", lambda learner, images, labels: [len(images), *labels])
    assert growing.known_classes(growth, growing.decode(growth)) == [12, *["washer"] * 12]


def test_nothing_is_left_beside_the_model(grown):
    names = {path.name for path in grown[0].iterdir()}
    assert names == {"january", "february", "one.cps", "two.cps"}


def test_the_same_images_again_are_known_and_a_left_over_checkpoint_goes(grown, tmp_path):
    model = shutil.copy(grown[0] / "two.cps", tmp_path / "model.cps")
    growing.checkpoint_of(model).write_bytes(b"left by a kill")
    growth = growing.prepare(model, look(grown[0] / "february"), Options(), cps.make_fabric(accelerator="cpu"))
    assert growth.done == 1
    assert not growing.checkpoint_of(model).exists()


def test_a_known_class_is_refused_or_learned_as_a_new_version(grown, tmp_path):
    model = shutil.copy(grown[0] / "one.cps", tmp_path / "model.cps")
    folder = write_image_folder(tmp_path / "march", ["bolt", "washer"], seed=3)
    with pytest.raises(ValueError, match=r"'bolt' was learned already, in task 1; .* --as-version .* 'bolt \(2\)'"):
        learn(folder, model)
    learn(folder, model, as_version=True)
    assert cps.load(model).network.subnetworks[1].classes == ("bolt (2)", "washer")
    again = write_image_folder(tmp_path / "april", ["bolt", "pin"], seed=4)
    learn(again, model, as_version=True)
    assert cps.load(model).network.subnetworks[2].classes == ("bolt (3)", "pin")
    both = write_image_folder(tmp_path / "may", ["bolt", "bolt (4)"], seed=5)
    with pytest.raises(ValueError, match="would become one class"):
        learn(both, model, as_version=True)


def test_what_a_model_was_made_with_cannot_be_wished_otherwise(grown, tmp_path):
    folder = write_image_folder(tmp_path / "march", ["pin", "washer"])
    fabric = cps.make_fabric(accelerator="cpu")
    for wishes, message in (
        (Options(size=16), "images of 8 pixels, which cannot become 16"),
        (Options(backbone="resnet32"), "backbone small, which cannot become resnet32"),
        (Options(pretrained=True), "for a new model"),
        (Options(seed=5), "seed 0, which cannot become 5"),
    ):
        with pytest.raises(ValueError, match=message):
            growing.prepare(grown[0] / "one.cps", look(folder), wishes, fabric)
    wishes = Options(size=8, backbone="small", epochs=7, batch_size=3, augment="none", alpha=0.6)
    growth = growing.prepare(grown[0] / "one.cps", look(folder), wishes, fabric)
    assert (growth.learner.train.epochs, growth.learner.retrain.epochs) == (7, 3)
    assert growth.learner.retrain.batch_size == 3
    assert growth.learner.augment is None
    assert growth.learner.pruner == cps.NNrelief(0.6)


def test_notes_of_ones_own_do_not_stand_in_the_way(grown, tmp_path):
    learner = cps.load(grown[0] / "one.cps", fabric=cps.make_fabric(accelerator="cpu"))
    learner.network.subnetworks[0].notes.update({"usual output": "much", "accuracy": 0.9, "shipment": 3})
    learner.save(tmp_path / "model.cps")
    growth = growing.prepare(tmp_path / "model.cps", look(grown[0] / "february"), Options(), learner.fabric)
    assert growing.known_classes(growth, growing.decode(growth)) == []


def test_a_shipment_of_one_class_is_learned_in_its_four_turns_and_later_ones_are_not(grown, tmp_path):
    model = Path(shutil.copy(grown[0] / "one.cps", tmp_path / "model.cps"))
    before = cps.load(model).fingerprint(0)
    learn(write_image_folder(tmp_path / "march", ["pin"]), model)
    grown_model = cps.load(model)
    assert grown_model.network.subnetworks[1].num_rotations == 4
    assert grown_model.rotations == cps.Upright()
    assert grown_model.fingerprint(0) == before


def test_a_second_learner_is_told_that_another_is_at_work(grown):
    with locked(grown[0] / "one.cps"), pytest.raises(LockedError, match=r"another program is changing .*one\.cps"):
        learn(grown[0] / "february", grown[0] / "one.cps")


def test_the_lock_of_a_killed_program_does_not_hold(tmp_path):
    (tmp_path / ".model.cps.lock").touch()
    with locked(tmp_path / "model.cps"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_was_removed_while_one_waited_is_taken_anew(tmp_path, monkeypatch):
    real, calls = lock._lock, []

    def too_late(descriptor):
        real(descriptor)
        if not calls:
            (tmp_path / ".model.cps.lock").unlink()  # its holder has just left
        calls.append(descriptor)

    monkeypatch.setattr(lock, "_lock", too_late)
    with locked(tmp_path / "model.cps"):
        assert len(calls) == 2
        assert (tmp_path / ".model.cps.lock").exists()


def test_images_of_a_known_class_under_another_name_are_noticed(grown, tmp_path):
    """The pattern of an image depends on the name of its class, so `bolt` drawn anew is the same class again."""
    root = write_image_folder(tmp_path / "new", ["bolt", "pin"], images=40, seed=3)
    (root / "bolt").rename(root / "screw")
    model = tmp_path / "model.cps"
    learn(write_image_folder(tmp_path / "old", ["bolt", "nut"], images=60), model, wishes=Options(epochs=6), share=0.4)
    growth = growing.prepare(model, look(root), Options(), cps.make_fabric(accelerator="cpu"))
    found = growing.known_classes(growth, growing.decode(growth))
    assert [warning[:40] for warning in found] == ["images of 'screw' look like 'bolt' of ta"]


def learn_until(folder, model, fatal):
    """Learn in a process of its own, which kills itself just before the `fatal`-th time it syncs or renames a file."""
    checkpoint.BUSY_SHARE = float("inf")  # epochs this short would be skipped
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


def test_a_kill_at_any_moment_leaves_a_model_that_works_and_learning_that_goes_on(grown, tmp_path):
    root, _ = grown
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["cps.app.learn_folder", "lightning_fabric", "hypothesis", "torch._dynamo"])
    model = tmp_path / "model.cps"
    old, whole = fingerprints(root / "one.cps"), fingerprints(root / "two.cps")

    def run(fatal):
        child = server.Process(target=learn_until, args=(root / "february", model, fatal))
        child.start()
        child.join()
        return child.exitcode

    shutil.copy(root / "one.cps", model)
    assert run(None) == 0
    steps = int((tmp_path / "steps").read_text())
    assert fingerprints(model) == whole
    for fatal in (1, steps // 2, steps - 3, steps - 1):  # the last two: before the swap, and after it
        shutil.copy(root / "one.cps", model)
        assert run(fatal) == -signal.SIGKILL
        assert fingerprints(model) in (old, whole)
        assert run(None) == 0
        assert fingerprints(model) == whole
        left = {path.name for path in tmp_path.iterdir() if path.suffix != ".partial"}
        assert left - {".model.cps.lock"} == {"model.cps", "steps"}


def test_what_is_held_out_can_be_read(tmp_path):
    """A class whose images are nearly all damaged still has one to learn from."""
    root = write_image_folder(tmp_path / "new", ["bolt", "nut"], images=10)
    shipment = look(root)
    held = min(shipment.held_out(0.1))  # of the first class
    for index, file in enumerate(shipment.files):
        if file.parent.name == "bolt" and index != held:
            file.write_bytes(b"damaged")
    growth = growing.prepare(tmp_path / "m.cps", look(root), WISHES, cps.make_fabric(accelerator="cpu"))
    read = growing.decode(growth, skip_damaged=True)
    assert read.labels.count("bolt") == 1
    (_, train), (_, held_out) = growing._split(growth.shipment, read, growth.names, 0.1)
    assert train.count("bolt") == 1
    assert held_out == ["nut"]


def test_a_decomposed_name_is_a_new_class_not_a_new_version(tmp_path, monkeypatch):
    root = write_image_folder(tmp_path / "new", ["pin", "cafe"])
    (root / "cafe").rename(root / unicodedata.normalize("NFD", "caf\u00e9"))
    growth = growing.prepare(tmp_path / "m.cps", look(root), WISHES, cps.make_fabric(accelerator="cpu"))
    asked = []
    monkeypatch.setattr(growing, "lookalikes", lambda learner, images, labels: asked.extend(labels) or [])
    growing.known_classes(growth, growing.decode(growth))
    assert len(set(asked)) == 2


def test_a_file_system_without_locks_is_not_called_another_program(tmp_path, monkeypatch):
    def none(descriptor):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock, "_lock", none)
    with pytest.raises(RuntimeError, match=r"knows no locks \(No locks available\)"), locked(tmp_path / "model.cps"):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("level", "claimed"), [(-1e9, "10"), (1e9, None)])
def test_a_class_is_like_another_only_if_that_claims_its_images_strongly(make_learner, level, claimed):
    learner, task = make_learner(), make_task(10)
    learner.learn(task)
    images = task.test[0][torch.tensor([label == 10 for label in task.test[1]])]
    evidence = learner.evidence(images)
    assert set(learner.predict(images).classes) == {10}
    assert resemblance._claimed(learner, evidence, 0, {"10": level, "11": level}) == claimed
