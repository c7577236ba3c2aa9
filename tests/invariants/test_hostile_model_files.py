"""Hostile model files load and predict, or raise `FileError`: a short run of the fuzzers in `fuzz/`."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from fuzz.malformed_files import KINDS, make_case, make_model, reseal
from fuzz.model_files import AuditHook, fuzz, outcome

import cps
from cps.storage import container as storage
from cps.storage.container import FileError
from cps.storage.settings_codec import encode
from samples import conv_net, make_task

HOOK = AuditHook()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def model(folder):
    return make_model(folder)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_fuzzed_file_loads_or_raises():
    counts, failures = fuzz(range(300))
    assert failures == {}
    assert {kind for kind, result in counts if result == "refused"} == set(KINDS)
    loaded = Counter(result for _, result in counts.elements())["loaded"]
    assert loaded > 10  # the negative control: not every file is refused


def test_a_case_depends_only_on_its_number(model, folder):
    for number in range(12):
        assert make_case(model, number, folder) == make_case(model, number, folder)


@pytest.mark.parametrize(
    ("load", "result"),
    [
        (lambda path, **_: {}["missing"], "KeyError: 'missing'"),
        (lambda path, **_: Path(path).with_name("written").write_text("x"), "did open"),
        (lambda path, **_: exec("raise ValueError('odd')"), "ValueError: odd"),
    ],
)
def test_negative_control_the_fuzzer_detects_what_a_reader_must_not_do(model, folder, load, result, monkeypatch):
    monkeypatch.setattr(cps, "load", load)
    assert outcome(model, model.content, folder / "case.cps", HOOK).startswith(result)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("selectors", ()), ("selectors", (5,)), ("selectors", None), ("rounds", None), ("rounds", -1), ("rounds", True), ("seed", "x"), ("seed", 2**70),
        ("normalize", 5), ("augment", "x"), ("prune_images", 0), ("capacity", 3), ("train", cps.Flip()), ("pruner", 3),
    ],
)  # fmt: skip
def test_settings_that_a_learner_cannot_have_raise(folder, model, name, value):
    header, tensors = storage.read(folder / "sound.cps", "model")
    header["settings"][name] = encode(value)
    storage.write(folder / "odd.cps", "model", header, tensors)
    with pytest.raises(FileError, match=f"damaged settings: {name}|a selector must be"):
        cps.load(folder / "odd.cps")


@pytest.mark.parametrize("shape", [(3,), (1, 6, 6), (3, 6, 6, 6), (4, 2**11, 2**11)])
def test_an_image_shape_that_the_backbone_cannot_process_raises(folder, model, shape):
    learner = cps.load(folder / "sound.cps")
    learner.network.input_shape = shape
    learner.save(folder / "odd.cps")
    with pytest.raises(FileError, match="cannot process images"):
        cps.load(folder / "odd.cps")


def test_a_head_of_another_width_than_the_features_raises(folder, model):
    learner = cps.load(folder / "sound.cps")
    learner.network.subnetworks[1].head["weight"] = learner.network.subnetworks[1].head["weight"][:, :7].clone()
    reseal(learner)
    learner.save(folder / "odd.cps")
    with pytest.raises(FileError, match="its heads expect \\[7, 64\\] features"):
        cps.load(folder / "odd.cps")


def test_loading_needs_no_memory_for_large_images(folder, model):
    learner = cps.load(folder / "sound.cps", selectors=(cps.MaxOutput(),))  # others depend on the shape
    learner.network.input_shape = (3, 9000, 9000)  # a gigabyte for one image, many for its activations
    learner.save(folder / "odd.cps")
    assert cps.load(folder / "odd.cps").network.input_shape == (3, 9000, 9000)


@pytest.mark.parametrize("damage", ["missing", "shape"])
def test_damaged_pretrained_weights_are_refused(tmp_path, damage):
    selectors = (cps.SharedSpace(cps.Pretrained()),)
    training = cps.Training(1, batch_size=16)
    learner = cps.Learner(conv_net(), rounds=0, train=training, selectors=selectors)
    learner.learn(make_task(0))
    path = tmp_path / "odd.cps"
    learner.save(path)
    assert cps.load(path, conv_net()).network.pretrained is not None
    name = next(iter(learner.network.pretrained))
    if damage == "missing":
        del learner.network.pretrained[name]
    else:
        learner.network.pretrained[name] = torch.zeros(3)
    learner.save(path)
    with pytest.raises(FileError, match=f"tensor 'pretrained/{name}' is"):
        cps.load(path, conv_net())
