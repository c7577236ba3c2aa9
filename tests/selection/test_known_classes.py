"""Known classes: more images of them, new versions, new names, and forgetting one of a task."""

import itertools

import pytest
import torch

import cps
from cps.selection import shared_space
from samples import Counts, conv_net, make_task

SHARED = cps.SharedSpace(cps.Pretrained())
FUSION = cps.Fusion(SHARED, cps.Cascade(size=8))
FIRSTS = (0, 10)
IMAGES = torch.cat([make_task(first).test[0] for first in FIRSTS])
TRAINING = cps.Training(2, cps.Adam(1e-2), batch_size=16)
SUMS = ("counts", "means", "scatter")


def new_learner(fabric, **settings):
    torch.manual_seed(0)
    settings = {"rounds": 1, "train": TRAINING, "retrain": TRAINING, "selectors": (FUSION,), **settings}
    return cps.Learner(conv_net(), fabric=fabric, **settings)


def part(task, rows):
    """Return a task of some of the training images, with the classes that are among them."""
    images, labels = task.train
    labels = [labels[row] for row in rows]
    return cps.Task(sorted(set(labels)), train=(images[list(rows)], labels))


def sums(learner, task=0):
    """Return counts, means and scatter of a task in the shared space, in float64."""
    kept = {k.removeprefix("shared "): v for k, v in learner.network.statistics("Fusion")[task].items()}
    scatter = kept["factors"].double().T @ kept["factors"].double() if "factors" in kept else None
    return {"counts": kept["counts"].double(), "means": kept["means"].double(), "scatter": scatter}


def assert_same_sums(learner, other, task=0):
    for name in SUMS:
        torch.testing.assert_close(sums(learner, task)[name], sums(other, task)[name], rtol=1e-6, atol=1e-6)


@pytest.fixture
def frozen(fabric):
    learner = new_learner(fabric)
    for first in FIRSTS:
        learner.learn_frozen(make_task(first, classes=3, images=30))
    return learner


@pytest.mark.parametrize("order", itertools.permutations([range(6, 12), range(12, 14), range(14, 30)]))
def test_sums_are_as_if_all_images_had_been_there_at_once_in_any_order(fabric, order):
    task = make_task(0, classes=3, images=30)
    whole, grown = new_learner(fabric), new_learner(fabric)
    whole.learn_frozen(task)
    grown.learn_frozen(part(task, range(6)))
    with pytest.raises(AssertionError):
        assert_same_sums(grown, whole)
    for rows in order:
        assert grown.add(part(task, rows)) == [0]
    assert_same_sums(grown, whole)


def test_sealed_subnetworks_and_their_fingerprints_stay(frozen):
    before = [frozen.fingerprint(task) for task in range(2)]
    known = frozen.predict(IMAGES, task=0)
    more = torch.cat([make_task(first, classes=3, seed=1).train[0][:6] for first in FIRSTS])
    assert frozen.add(cps.Task([0, 1, 2, 10, 11, 12], train=(more, [0, 1, 2] * 2 + [10, 11, 12] * 2))) == [0, 1]
    assert [frozen.fingerprint(task) for task in range(2)] == before
    assert frozen.predict(IMAGES, task=0).classes == known.classes
    frozen.network.check_sealed()


def test_images_of_another_look_are_recognised_once_they_are_added(frozen):
    """Images of class 0 that look like nothing before: the pattern of class 40."""
    images = make_task(40, classes=1, images=40).train[0]
    assert 0 not in frozen.predict(images[20:]).classes or frozen.predict(images[20:]).classes.count(0) < 20
    frozen.add(cps.Task([0], train=(torch.cat([images[:20]] * 2), [0] * 40)))
    assert frozen.predict(images[20:]).classes.count(0) >= 16


def test_log_losses_of_added_images_count(frozen):
    before = frozen.network.statistics("Fusion")[0]["shared log losses"]
    frozen.add(part(make_task(0, classes=3, images=30, seed=3), range(12)))
    assert (frozen.network.statistics("Fusion")[0]["shared log losses"] > before).any()


def test_sums_grow_beside_trained_tasks_and_in_models_from_files(fabric, tmp_path):
    learner = new_learner(fabric)
    learner.learn(make_task(0))
    learner.learn_frozen(make_task(10))
    learner.save(tmp_path / "model.cps")
    loaded = cps.load(tmp_path / "model.cps", conv_net(), fabric=fabric)
    more = part(make_task(0, seed=2), range(10))
    for each in (learner, loaded):
        each.add(more)
    assert_same_sums(learner, loaded)
    assert float(sums(learner)["counts"].sum()) == 34


def test_many_images_are_summed_over_classes_and_grow_too(fabric, monkeypatch):
    """More rows than twice the features: one matrix takes less memory than those of the classes."""
    monkeypatch.setattr(shared_space, "ALWAYS_BY_CLASS", 0)
    task = make_task(0, classes=4, images=200)
    whole, grown = new_learner(fabric), new_learner(fabric)
    whole.learn_frozen(task)
    grown.learn_frozen(part(task, range(8)))
    grown.add(part(task, range(8, 200)))
    kept = [each.network.statistics("Fusion")[0] for each in (whole, grown)]
    for each in kept:
        assert "shared scatter" in each
        assert "shared factors" not in each
    for name in ("shared counts", "shared means", "shared scatter"):
        torch.testing.assert_close(kept[0][name], kept[1][name], rtol=1e-5, atol=1e-6)


def test_wrong_additions_raise_and_change_nothing(frozen, fabric):
    before = sums(frozen)
    with pytest.raises(ValueError, match="class 7 was not learned yet"):
        frozen.add(cps.Task([0, 7], train=(IMAGES[:2], [0, 7])))
    with pytest.raises(ValueError, match="NaN"):
        frozen.add(cps.Task([0], train=(torch.full((2, 2, 6, 6), torch.nan), [0, 0])))
    assert all(torch.equal(before[name], sums(frozen)[name]) for name in SUMS)
    other = new_learner(fabric, selectors=(cps.MaxOutput(),))
    with pytest.raises(ValueError, match="MaxOutput keep no sums"):
        other.add(make_task(0))
    with pytest.raises(RuntimeError, match="nothing has been learned yet"):
        new_learner(fabric).add(make_task(0))


def test_known_classes_are_learned_again_only_as_new_versions(fabric, tmp_path):
    learner = new_learner(fabric)
    learner.learn(make_task(0))
    with pytest.raises(ValueError, match=r"class 0 was already learned, in task 0; .* new_versions=True"):
        learner.learn(make_task(0, seed=1))
    before = learner.fingerprint(0)
    images, labels = make_task(0, seed=1).train
    learner.learn(cps.Task([0, 5], train=(images, [5 if label == 1 else 0 for label in labels])), new_versions=True)
    assert learner.classes == [(0, 1), (0, 5)]
    assert learner.fingerprint(0) == before
    assert learner.network.tasks_of(0) == [0, 1]
    learner.save(tmp_path / "model.cps")
    loaded = cps.load(tmp_path / "model.cps", conv_net(), fabric=fabric)
    assert loaded.classes == learner.classes
    found = loaded.predict(torch.cat([make_task(0).test[0], make_task(0, seed=1).test[0]]))
    assert {0, 1, 5} >= set(found.classes)
    versions = [task for name, task in zip(found.classes, found.tasks.tolist(), strict=True) if name == 0]
    assert set(versions) == {0, 1}
    learner.add(cps.Task([0], train=(images[:2], [0, 0])))
    assert [float(sums(learner, task)["counts"][0]) for task in (0, 1)] == [12, 14]


@pytest.mark.parametrize("forgotten", range(3))
def test_the_sums_are_as_if_a_forgotten_class_had_never_been_there(fabric, forgotten):
    task = make_task(0, classes=3, images=30)
    learner, never = new_learner(fabric), new_learner(fabric)
    learner.learn_frozen(task)
    never.learn_frozen(part(task, [row for row in range(30) if row % 3 != forgotten]))
    learner.forget_class(forgotten)
    assert learner.classes == never.classes
    assert_same_sums(learner, never)
    assert forgotten not in learner.predict(IMAGES).classes


def test_forgetting_a_class_cuts_its_outputs_and_leaves_those_of_others_to_the_bit(fabric, tmp_path):
    learner = new_learner(fabric, rotations=cps.Rotations())
    learner.learn(make_task(0, classes=3, images=30))
    learner.learn(make_task(10))
    logits, other = learner.evidence(IMAGES)[0].logits, learner.fingerprint(1)
    learner.forget_class(1)
    assert learner.classes == [(0, 2), (10, 11)]
    assert torch.equal(learner.network.full_outputs([IMAGES], 0).logits, logits[:, [0, 2]]) or torch.allclose(
        learner.evidence(IMAGES)[0].logits, logits[:, [0, 2]], atol=1e-5
    )
    assert learner.fingerprint(1) == other
    learner.network.check_sealed()
    learner.save(tmp_path / "model.cps")
    loaded = cps.load(tmp_path / "model.cps", conv_net(), fabric=fabric)
    assert loaded.predict(IMAGES).classes == learner.predict(IMAGES).classes
    learner.learn(make_task(20))
    assert 1 not in learner.predict(IMAGES).classes


def test_a_task_whose_last_class_is_forgotten_goes_too(frozen):
    for name in (10, 11, 12):
        frozen.forget_class(name)
    assert frozen.classes == [(0, 1, 2)]
    with pytest.raises(ValueError, match=r"no task has learned the class '11'|no task has learned the class 11"):
        frozen.forget_class(11)


def test_all_versions_of_a_class_are_forgotten(fabric):
    learner = new_learner(fabric)
    learner.learn_frozen(make_task(0))
    learner.learn(make_task(0, seed=1), new_versions=True)
    learner.learn_frozen(make_task(10, classes=1))
    learner.forget_class(0)
    assert learner.classes == [(1,), (1,), (10,)]


def test_selectors_that_cannot_forget_a_class_lose_their_statistics_of_the_task(fabric, caplog):
    learner = new_learner(fabric, selectors=(FUSION, cps.MaxOutput(), Counts()))
    learner.learn_frozen(make_task(0))
    learner.forget_class(0)
    assert set(learner.network.subnetworks[0].statistics) == {"Fusion", "MaxOutput", "familiarity"}
    assert "Counts cannot take a class out of its statistics" in caplog.text
    first = new_learner(fabric, selectors=(Counts(), FUSION))
    first.learn_frozen(make_task(0)) if first.network.pretrained else first.learn(make_task(0))
    with pytest.raises(ValueError, match="Counts cannot take a class out"):
        first.forget_class(0)
    assert first.classes == [(0, 1)]


def test_a_covariance_of_all_classes_is_left_out_with_one_of_them(fabric, monkeypatch):
    monkeypatch.setattr(shared_space, "ALWAYS_BY_CLASS", 0)
    learner = new_learner(fabric)
    learner.learn_frozen(make_task(0, classes=4, images=200))
    learner.forget_class(0)
    assert sums(learner)["scatter"] is None
    assert set(learner.predict(make_task(0, classes=4).test[0]).classes) <= {1, 2, 3}


def test_a_renamed_class_keeps_everything_but_its_name(frozen, tmp_path):
    before, outputs = frozen.predict(IMAGES), frozen.fingerprint(0).outputs
    frozen.rename(0, "zero")
    assert frozen.classes == [("zero", 1, 2), (10, 11, 12)]
    after = frozen.predict(IMAGES)
    assert after.classes == ["zero" if name == 0 else name for name in before.classes]
    assert torch.equal(after.task_scores, before.task_scores)
    assert frozen.fingerprint(0).outputs == outputs
    frozen.save(tmp_path / "model.cps")
    assert cps.load(tmp_path / "model.cps", conv_net(), fabric=frozen.fabric).classes == frozen.classes


def test_wrong_names_raise_and_change_nothing(frozen):
    frozen.rename(0, "bolt")
    with pytest.raises(ValueError, match="the class 1 exists already; two classes cannot become one"):
        frozen.rename("bolt", 1)
    with pytest.raises(ValueError, match=r"no task has learned the class 'bold'; did you mean 'bolt'\?"):
        frozen.rename("bold", "nut")
    with pytest.raises(TypeError, match="must be a string or an int"):
        frozen.rename("bolt", None)
    assert frozen.classes[0] == ("bolt", 1, 2)
