"""Hostile model files: whatever is in one, it loads and predicts, or is refused; a short part of what `fuzz/` does."""

from collections import Counter
from pathlib import Path

import pytest
from fuzz.model_files import Watch, fuzz, outcome
from fuzz.odd_files import KINDS, make_case, make_model, reseal

import cps
from cps.storage.container import FileError

WATCH = Watch()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def model(folder):
    return make_model(folder)


@pytest.mark.filterwarnings("ignore")
def test_no_odd_file_does_anything_but_load_or_be_refused():
    counts, failures = fuzz(range(300))
    assert failures == {}
    assert {kind for kind, said in counts if said == "refused"} == set(KINDS)
    assert (
        Counter(said for _, said in counts.elements())["loaded"] > 10
    )  # so that the others are not refused for nothing


def test_a_case_depends_on_its_number_alone(model, folder):
    for number in range(12):
        assert make_case(model, number, folder) == make_case(model, number, folder)


@pytest.mark.parametrize(
    ("misdeed", "said"),
    [
        (lambda path, **_: {}["missing"], "KeyError: 'missing'"),
        (lambda path, **_: Path(path).with_name("written").write_text("x"), "did open"),
        (lambda path, **_: exec("raise ValueError('odd')"), "ValueError: odd"),
    ],
)
def test_negative_control_the_fuzzer_notices_what_a_reader_must_not_do(model, folder, misdeed, said, monkeypatch):
    monkeypatch.setattr(cps, "load", misdeed)
    assert outcome(model, model.content, folder / "case.cps", WATCH).startswith(said)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("selectors", ()), ("selectors", (5,)), ("rounds", -1), ("rounds", True), ("seed", "x"), ("seed", 2**70),
        ("normalize", 5), ("augment", "x"), ("prune_images", 0), ("capacity", 3), ("train", cps.Flip()), ("pruner", 3),
    ],
)  # fmt: skip
def test_settings_that_no_learner_could_have_are_refused(folder, model, name, value):
    learner = cps.load(folder / "sound.cps")
    setattr(learner, name, value)
    learner.save(folder / "odd.cps")
    with pytest.raises(FileError, match=f"damaged settings: {name} cannot be"):
        cps.load(folder / "odd.cps")


@pytest.mark.parametrize("shape", [(3,), (1, 6, 6), (3, 6, 6, 6), (4, 2**11, 2**11)])
def test_images_that_the_backbone_cannot_look_at_are_refused(folder, model, shape):
    learner = cps.load(folder / "sound.cps")
    learner.network.input_shape = shape
    learner.save(folder / "odd.cps")
    with pytest.raises(FileError, match="cannot look at images"):
        cps.load(folder / "odd.cps")


def test_a_head_of_another_width_than_the_features_is_refused(folder, model):
    learner = cps.load(folder / "sound.cps")
    learner.network.subnetworks[1].head["weight"] = learner.network.subnetworks[1].head["weight"][:, :7].clone()
    reseal(learner)
    learner.save(folder / "odd.cps")
    with pytest.raises(FileError, match="its heads read \\[7, 64\\] features"):
        cps.load(folder / "odd.cps")


def test_large_images_cost_nothing_to_load(folder, model):
    learner = cps.load(folder / "sound.cps")
    learner.network.input_shape = (3, 9000, 9000)  # a gigabyte for one image, many for what a layer makes of it
    learner.save(folder / "odd.cps")
    assert cps.load(folder / "odd.cps").network.input_shape == (3, 9000, 9000)
