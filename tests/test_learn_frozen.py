"""Tasks learned without training: the backbone as it came, with a head in closed form."""

from dataclasses import replace

import pytest
import torch

import cps
from cps.selection.fusion import DEFAULT_WEIGHTS
from samples import ROUNDING, conv_net, make_task

FUSION = cps.Fusion(cps.SharedSpace(cps.Pretrained()), cps.Cascade(size=8))
FIRSTS = (0, 10, 20)
IMAGES = torch.cat([make_task(first).test[0] for first in FIRSTS])
CLASSES = [label for first in FIRSTS for label in make_task(first).test[1]]
TRAINING = cps.Training(2, cps.Adam(1e-2), batch_size=16)


def new_learner(fabric, **settings):
    torch.manual_seed(0)
    settings = {"rounds": 1, "train": TRAINING, "retrain": TRAINING, "selectors": (FUSION,), **settings}
    return cps.Learner(conv_net(), fabric=fabric, **settings)


@pytest.fixture(scope="module")
def frozen(fabric):
    """Return a learner of three tasks without training; tests must not change it."""
    learner = new_learner(fabric)
    for first in FIRSTS:
        learner.learn_frozen(make_task(first))
    return learner


@pytest.fixture
def mixed(fabric):
    """Return a learner of a task without training, one with training, and another one without."""
    learner = new_learner(fabric)
    learner.learn_frozen(make_task(0))
    learner.learn(make_task(10))
    learner.learn_frozen(make_task(20))
    return learner


def right(found):
    return sum(name == label for name, label in zip(found.classes, CLASSES, strict=True)) / len(CLASSES)


def test_tasks_are_learned_and_take_no_weights(frozen):
    assert right(frozen.predict(IMAGES)) > 0.8
    assert frozen.network.free_share() == 1
    assert all(subnetwork.is_frozen for subnetwork in frozen.network.subnetworks)
    assert all(torch.equal(frozen.network.pretrained[n], weight) for n, weight in frozen.network.weights.items())


def test_predictions_are_those_of_the_closed_form(frozen):
    kept = [{n.removeprefix("shared "): v for n, v in k.items()} for k in frozen.network.statistics("Fusion")]
    evidence = frozen.evidence(IMAGES)
    precomputed = FUSION.shared.precompute(kept)
    classes = torch.cat([FUSION.shared.score_classes(evidence, precomputed, task) for task in range(3)], dim=1)
    names = [name for classes in frozen.classes for name in classes]
    assert frozen.predict(IMAGES).classes == [names[index] for index in classes.argmax(dim=1).tolist()]


def test_a_known_task_is_told_apart_by_its_own_head_alone(frozen):
    images, labels = make_task(10).test
    assert frozen.predict(images, task=1).classes == labels


def test_all_frozen_tasks_share_one_pass_of_the_backbone(frozen):
    frozen.predict(IMAGES)
    passes = []
    module = frozen.network.space_module(cps.Pretrained())
    hook = module.register_forward_hook(lambda *_: passes.append(1))
    frozen.predict(IMAGES)
    frozen.evidence(IMAGES).compute()
    hook.remove()
    assert len(passes) == 2


def test_later_tasks_change_no_earlier_one_with_or_without_training(fabric):
    learner, seen = new_learner(fabric), []
    for first, learn in zip((0, 10, 20, 30), (learner.learn_frozen, learner.learn) * 2, strict=True):
        learn(make_task(first))
        seen.append(learner.fingerprint(len(seen)))
        assert [learner.fingerprint(task) for task in range(len(seen))] == seen
    assert 0 < learner.network.free_share() < 1
    learner.network.check_sealed()


def test_trained_tasks_among_frozen_ones_are_learned(mixed):
    assert [each.is_frozen for each in mixed.network.subnetworks] == [True, False, True]
    assert right(mixed.predict(IMAGES)) > 0.8
    assert FUSION.weights(mixed.network.statistics("Fusion")) == DEFAULT_WEIGHTS
    assert any(not torch.equal(mixed.network.pretrained[n], weight) for n, weight in mixed.network.weights.items())


def test_a_change_of_the_pretrained_weights_is_detected(mixed):
    name = next(iter(mixed.network.pretrained))
    mixed.network.pretrained[name] = mixed.network.pretrained[name] + 1e-6
    with pytest.raises(RuntimeError, match="has changed since it was sealed"):
        mixed.network.check_sealed()


@pytest.mark.parametrize("name", ["frozen", "mixed"])
def test_files_hold_the_pretrained_weights_once(name, request, tmp_path):
    learner = request.getfixturevalue(name)
    learner.save(tmp_path / "model.cps")
    loaded = cps.load(tmp_path / "model.cps", conv_net(), fabric=learner.fabric)
    assert [loaded.fingerprint(task) for task in range(3)] == [learner.fingerprint(task) for task in range(3)]
    found, expected = loaded.predict(IMAGES), learner.predict(IMAGES)
    assert found.classes == expected.classes
    assert torch.equal(found.task_scores, expected.task_scores)
    _, tensors = cps.network.model_file.read_model(tmp_path / "model.cps")
    assert any(name.startswith("pretrained/") for name in tensors) == (name == "mixed")


def test_a_file_without_the_pretrained_weights_of_a_frozen_task_is_refused(mixed, tmp_path):
    mixed.network.pretrained = None
    with pytest.raises((ValueError, RuntimeError)):
        mixed.save(tmp_path / "model.cps")


def test_forgetting_leaves_the_other_tasks_and_gives_free_weights_their_pretrained_values(mixed):
    before = [mixed.fingerprint(task) for task in (0, 2)]
    mixed.forget(1)
    assert [mixed.fingerprint(task) for task in (0, 1)] == before
    assert all(torch.equal(mixed.network.pretrained[n], weight) for n, weight in mixed.network.weights.items())
    assert set(mixed.predict(IMAGES).classes) <= {0, 1, 20, 21}


def test_an_extracted_task_and_the_module_of_all_tasks_give_the_same_outputs(mixed):
    for task in range(3):
        outputs = mixed.evidence(IMAGES)[task]
        extracted = mixed.extract(task).outputs(IMAGES.to(mixed.network.device))
        torch.testing.assert_close(extracted.logits, outputs.logits, **(ROUNDING or {"rtol": 1e-4, "atol": 1e-4}))
    module = cps.AllTasksModule(mixed.network, FUSION)
    found = module(IMAGES.to(mixed.network.device))
    names = [module.classes[index] for index in found.class_index.tolist()]
    assert names == mixed.predict(IMAGES).classes


def test_one_class_and_one_image_of_a_class_are_learned(fabric):
    learner = new_learner(fabric)
    learner.learn_frozen(make_task(0, classes=1))
    images, labels = make_task(10, classes=3).train
    learner.learn_frozen(cps.Task([10, 11, 12], train=(images[:5], labels[:5])))  # one image of the last class
    learner.learn_frozen(cps.Task([20, 21], train=(torch.zeros(4, 2, 6, 6), [20, 20, 21, 21])))  # all the same
    found = learner.predict(make_task(0, classes=1).test[0])
    assert found.classes.count(0) >= 10
    assert learner.predict(IMAGES, task=0).classes == [0] * len(IMAGES)


def test_a_task_that_fails_leaves_the_learner_as_it_was(fabric):
    learner = new_learner(fabric, selectors=(cps.MaxOutput(),))
    nan = torch.full((4, 2, 6, 6), torch.nan)
    with pytest.raises((ValueError, FloatingPointError), match="NaN"):
        learner.learn_frozen(cps.Task([0, 1], train=(nan, [0, 1, 0, 1])))
    assert learner.network.pretrained is None
    assert learner.network.subnetworks == []


def test_frozen_tasks_need_the_weights_that_the_backbone_came_with(fabric):
    learner = new_learner(fabric, selectors=(cps.MaxOutput(),))
    learner.learn(make_task(0))
    with pytest.raises(ValueError, match="the weights that the backbone came with were not kept"):
        learner.learn_frozen(make_task(10))
    assert len(learner.network.subnetworks) == 1


def test_other_selectors_work_with_frozen_tasks(fabric):
    selectors = (cps.MaxOutput(), cps.Cascade(size=8), cps.ImportanceSignature(), FUSION)
    learner = new_learner(fabric, selectors=selectors)
    for first in FIRSTS:
        learner.learn_frozen(make_task(first))
    for selector in selectors:
        assert len(learner.predict(IMAGES, selector=selector, group_size=12).classes) == len(CLASSES)
    assert right(learner.predict(IMAGES, selector=selectors[1], group_size=12)) > 0.8
    assert replace(FUSION, task_weight=1.0).weights(learner.network.statistics("Fusion")) == (0.0, 0.0)


def test_known_classes_are_refused(frozen):
    with pytest.raises(ValueError, match="already learned"):
        frozen.learn_frozen(make_task(10))
