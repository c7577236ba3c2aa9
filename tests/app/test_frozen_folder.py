"""Folders on frozen pretrained features: known classes grow, memory is bounded, nothing is lost."""

import itertools
import multiprocessing
import os
import shutil
import signal

import numpy as np
import pytest
import torch
from PIL import Image

import cps
from cps.app import frozen_folder
from cps.app.autoconfig import Options
from cps.app.folder_scan import scan_folder
from cps.app.frozen_folder import read_features
from cps.app.inspect import verify
from cps.app.learn_folder import learn_folder, make_plan, read_images, similar_image_warnings
from cps.closed_form.spaces import Pretrained
from cps.data.decode import ImageFormat
from cps.data.image_folder import read_folder
from cps.export.tasks import export_all
from samples import write_image_folder

NEW = Options(size=16, backbone="small", pretrained=True)


def learn(folder, model, weights=None, hold_out=0.1):
    options = Options() if model.exists() else NEW
    plan = make_plan(model, scan_folder(folder), options, cps.make_fabric(accelerator="cpu"), weights=weights)
    assert plan.is_frozen
    return None if plan.learned_as is not None else learn_folder(plan, read_images(plan), hold_out=hold_out)


def write(folder, classes, seed, images=10):
    return write_image_folder(folder, classes, images=images, size=16, seed=seed)


def load(model):
    return cps.load(model, fabric=cps.make_fabric(accelerator="cpu"))


def sums(model, task=0):
    kept = load(model).network.statistics("Fusion")[task]
    factors = kept["shared factors"].double()
    return {"counts": kept["shared counts"], "means": kept["shared means"], "scatter": factors.T @ factors}


@pytest.fixture(scope="module")
def january(tmp_path_factory, weights):
    """Return a folder with january.cps, a model of bolt and nut, and the folder of images that it has learned."""
    root = tmp_path_factory.mktemp("frozen")
    write(root / "january", ["bolt", "nut"], seed=1)
    learn(root / "january", root / "january.cps", weights)
    return root


@pytest.fixture
def model(january, tmp_path):
    """Return a copy of the model that a test may change."""
    return shutil.copy(january / "january.cps", tmp_path / "model.cps")


def test_a_folder_with_new_and_known_classes_learns_the_new_and_adds_to_the_known(model, tmp_path):
    before = load(model).fingerprint(0)
    learned = learn(write(tmp_path / "march", ["bolt", "pin"], seed=2), model)
    assert (learned.task, learned.added, learned.images, learned.held_out) == (1, {"bolt": 10}, 20, 2)
    learner = load(model)
    assert learner.classes == [("bolt", "nut"), ("pin",)]
    assert learner.fingerprint(0) == before
    assert sums(model)["counts"].tolist() == [20, 10]
    notes = learner.network.subnetworks[0].notes
    assert notes["classes"] == {"bolt": 20, "nut": 10}
    assert [addition["folder"] for addition in notes["additions"]] == ["march"]
    assert all("identical" in check.result or check.result == "ok" for check in verify(model))


def test_a_folder_of_known_classes_alone_makes_no_task(model, tmp_path):
    learned = learn(write(tmp_path / "march", ["nut"], seed=2), model)
    assert (learned.task, learned.added) == (None, {"nut": 10})
    assert load(model).classes == [("bolt", "nut")]
    assert sum(load(model).network.subnetworks[0].notes["confusion"]["nut"].values()) == 2


@pytest.mark.parametrize("order", itertools.permutations([2, 3]))
def test_folders_in_any_order_are_as_one_folder(tmp_path, weights, order):
    together, apart = tmp_path / "together.cps", tmp_path / "apart.cps"
    parts = {seed: write(tmp_path / str(seed), ["bolt", "nut"], seed) for seed in (1, 2, 3)}
    whole = tmp_path / "whole"
    for seed, part in parts.items():
        for file in part.glob("*/*"):
            (whole / file.parent.name).mkdir(parents=True, exist_ok=True)
            shutil.copy(file, whole / file.parent.name / f"{seed}-{file.name}")
    learn(whole, together, weights)
    for seed in (1, *order):
        learn(parts[seed], apart, weights)
    for name, value in sums(together).items():
        torch.testing.assert_close(sums(apart)[name], value, rtol=1e-6, atol=1e-6)


def test_classes_of_older_models_with_a_version_in_their_name_are_known_by_that_name(model, tmp_path):
    """`--as-version`, which is gone, gave such names."""
    learner = load(model)
    learner.rename("nut", "bolt (2)")
    learner.save(model)
    learned = learn(write(tmp_path / "march", ["bolt (2)", "pin"], seed=2), model)
    assert learned.added == {"bolt (2)": 10}
    assert load(model).classes == [("bolt", "bolt (2)"), ("pin",)]


def test_held_out_images_measure_the_accuracy_and_are_added_then(january):
    assert sums(january / "january.cps")["counts"].tolist() == [10, 10]
    notes = load(january / "january.cps").network.subnetworks[0].notes
    assert (notes["images"], notes["held out"]) == (20, 2)


def test_the_same_images_are_added_once(january, model, tmp_path):
    before = model.read_bytes()
    assert learn(january / "january", model) is None
    assert model.read_bytes() == before
    both = shutil.copytree(january / "january", tmp_path / "both")
    shutil.copytree(write(tmp_path / "more", ["bolt"], seed=5), both, dirs_exist_ok=True, copy_function=_other_name)
    assert learn(both, model).added == {"bolt": 10}
    assert sums(model)["counts"].tolist() == [20, 10]
    assert learn(tmp_path / "more", model) is None


def _other_name(source, target):
    return shutil.copy(source, f"{target.removesuffix('.png')}-more.png")


def test_known_classes_of_trained_models_are_new_versions_although_they_start_pretrained(tmp_path, weights):
    model, fabric = tmp_path / "model.cps", cps.make_fabric(accelerator="cpu")
    trained = Options(size=16, backbone="small", pretrained=True, epochs=1, batch_size=8)
    plan = make_plan(model, scan_folder(write(tmp_path / "a", ["bolt", "nut"], 1)), trained, fabric, weights=weights)
    learn_folder(plan, read_images(plan))
    plan = make_plan(model, scan_folder(write(tmp_path / "b", ["bolt", "pin"], 2)), Options(), fabric)
    assert not plan.is_frozen
    learn_folder(plan, read_images(plan))
    assert load(model).classes == [("bolt", "nut"), ("bolt", "pin")]


def test_features_are_those_of_the_images_and_only_a_few_images_are_in_memory(january, tmp_path, monkeypatch):
    monkeypatch.setattr(frozen_folder, "BATCH", 4)
    network, folder = load(january / "january.cps").network, write(tmp_path / "new", ["pin", "gear"], 3)
    most = []
    compute = network.features

    def record(batches, space):
        most.append(max(map(len, batches)))
        return compute(batches, space)

    expected = compute([read_folder(folder, size=16).images], Pretrained())
    monkeypatch.setattr(network, "features", record)
    read = read_features(network, folder, scan_folder(folder).files, ImageFormat(16))
    torch.testing.assert_close(read.known, expected)
    assert max(most) == 4
    assert len(most) == 5
    assert read[3][0].shape == (3, 16, 16)


def test_learning_frozen_features_does_not_decode_all_images_again(january, model, tmp_path, monkeypatch):
    folder, decoded = write(tmp_path / "new", ["pin", "nut"], 3, images=40), []
    monkeypatch.setattr(ImageFormat, "decode", _counting(ImageFormat.decode, decoded))
    learn(folder, model)
    assert len(decoded) <= 80 + 3 * 17  # again for the checks of shape and range: a few images each time


def _counting(function, calls):
    def wrapped(*arguments):
        calls.append(arguments)
        return function(*arguments)

    return wrapped


def test_damaged_images_are_named_or_skipped(model, tmp_path):
    folder = write(tmp_path / "new", ["pin", "nut"], 3)
    (folder / "pin" / "bad.png").write_bytes(b"damaged")
    plan = make_plan(model, scan_folder(folder), Options(), cps.make_fabric(accelerator="cpu"))
    with pytest.raises(cps.ImageError, match=r"pin/bad.png' is not an image .*\nuse --skip-damaged"):
        read_images(plan)
    content = read_images(plan, skip_damaged=True)
    assert len(content.skipped) == 1
    assert learn_folder(plan, content).images == 20


def test_one_image_of_each_class_is_learned(tmp_path, weights):
    learned = learn(write(tmp_path / "one", ["bolt", "nut", "pin"], 1, images=1), tmp_path / "m.cps", weights)
    assert learned.accuracy is None
    learner = load(tmp_path / "m.cps")
    images = read_folder(tmp_path / "one", size=16).images
    assert learner.predict(images).classes == ["bolt", "nut", "pin"]
    learn(write(tmp_path / "more", ["bolt", "nut", "pin"], 2, images=4), tmp_path / "m.cps")
    assert sums(tmp_path / "m.cps")["counts"].tolist() == [5, 5, 5]


def test_colour_and_grey_images_may_be_mixed(model, tmp_path):
    folder = write(tmp_path / "new", ["pin", "nut"], 3)
    for file in sorted(folder.glob("*/*"))[::2]:
        Image.open(file).convert("L").save(file)
    assert learn(folder, model).images == 20


def test_new_classes_that_look_like_known_ones_cause_a_warning_without_their_images_in_memory(tmp_path, weights):
    """The pattern of an image depends on the name of its class, so other images of `bolt` are the same class."""
    learn(write(tmp_path / "old", ["bolt", "nut"], 1, images=40), tmp_path / "m.cps", weights, hold_out=0.3)
    new = write(tmp_path / "new", ["bolt", "pin"], 2)
    (new / "bolt").rename(new / "screw")
    plan = make_plan(tmp_path / "m.cps", scan_folder(new), Options(), cps.make_fabric(accelerator="cpu"))
    found = similar_image_warnings(plan, read_images(plan))
    assert [warning[:50] for warning in found] == ["images of 'screw' resemble class 'bolt' of task 1;"]


@pytest.mark.slow
def test_models_that_have_grown_are_exported_with_the_backbone_once(model, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    learn(write(tmp_path / "march", ["bolt", "pin"], seed=2), model)
    learner, file = load(model), tmp_path / "model.onnx"
    export_all(learner, file)
    assert file.stat().st_size < 1.5 * 4 * sum(value.numel() for value in learner.network.weights.values()) + 100_000
    images = read_folder(tmp_path / "march", size=16).images
    (found, *_) = onnxruntime.InferenceSession(file).run(["class"], {"images": images.numpy() / np.float32(255)})
    names = [name for classes in learner.classes for name in classes]
    assert [names[index] for index in found.tolist()] == learner.predict(images).classes


def _learn_until_killed(folder, model, fatal):
    calls = []

    def counting(real):
        def wrapped(*arguments, **settings):
            calls.append(real)
            if len(calls) == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **settings)

        return wrapped

    os.fsync, os.replace = counting(os.fsync), counting(os.replace)
    type(model).replace = counting(type(model).replace)
    learn(folder, model)


@pytest.mark.slow
def test_a_kill_while_images_are_added_leaves_the_old_model_and_nothing_is_added_twice(model, tmp_path):
    folder, old = write(tmp_path / "march", ["bolt", "pin"], seed=2), model.read_bytes()
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["cps.app.learn_folder", "lightning_fabric", "hypothesis", "torch._dynamo"])
    child = server.Process(target=_learn_until_killed, args=(folder, model, 2))  # before the model is replaced
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert model.read_bytes() == old
    learn(folder, model)
    assert learn(folder, model) is None
    assert sums(model)["counts"].tolist() == [20, 10]
