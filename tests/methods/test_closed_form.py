"""Closed forms as a method: exact, the same in any order, with tasks that can be forgotten and files that are checked."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge as RidgeRegression
from sklearn.neighbors import NearestCentroid
from torch import nn

import cps
from cps.methods import closed_form
from cps.methods.closed_form import ClosedForm, best_classes, select_tasks
from cps.storage import container
from samples import ListDataset, conv_net, make_task

SPACE, SHRUNK = cps.RandomReLU(30), cps.LDA(0.1)
PROBES = make_task(0, test=20).test[0]
BOTH = pytest.mark.parametrize("pooled", [False, True], ids=["covariance of each task", "pooled"])


@pytest.fixture(scope="module")
def tasks():
    """Return three tasks of two, three and two classes with different numbers of images."""
    return [make_task(0, images=26), make_task(10, classes=3, images=36), make_task(20, images=24)]


def learned(tasks, classifier=SHRUNK, space=SPACE, **settings):
    method = ClosedForm(space, classifier, **settings)
    for task in tasks:
        method.learn(task)
    return method


def all_images(tasks, part="train"):
    images = torch.cat([getattr(task, part)[0] for task in tasks])
    return images, [label for task in tasks for label in getattr(task, part)[1]]


def take(task, indices):
    """Return a task with some of its images."""
    images, labels = task.train
    return replace(task, train=(images[indices], [labels[index] for index in indices]))


def halves(task):
    """Return two tasks with half of the images of each class."""
    indices = range(len(task.train[1]))
    return [take(task, [i for i in indices if i // len(task.classes) % 2 == part]) for part in (0, 1)]


def scores_by_name(method):
    names = [name for classes in method.classes for name in classes]
    return dict(zip(names, method.scores(PROBES).T, strict=True))


def assert_same(first, second):
    """Check that two methods give the same classes the same scores, whatever their order."""
    expected, found = scores_by_name(first), scores_by_name(second)
    assert set(found) == set(expected)
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=1e-6, atol=1e-6)


def content(method, path):
    method.save(path)
    return path.read_bytes()


@BOTH
def test_lda_of_tasks_in_turn_equals_scikit_learn_on_all_images_at_once(tasks, pooled):
    method = learned(tasks, cps.LDA(0.2), pooled=pooled)
    images, labels = all_images(tasks)
    reference = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.2).fit(method.features(images).double(), labels)
    expected = reference.decision_function(method.features(PROBES).double()) - np.log(reference.priors_)
    found = method.scores(PROBES).numpy()
    np.testing.assert_allclose(found - found[:, :1], expected - expected[:, :1], rtol=1e-6, atol=1e-6)
    other = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.3).fit(method.features(images).double(), labels)
    differing = other.decision_function(method.features(PROBES).double()) - np.log(other.priors_)
    assert np.abs((differing - differing[:, :1]) - (found - found[:, :1])).max() > 1e-2  # the negative control


@BOTH
def test_ridge_of_tasks_in_turn_equals_scikit_learn_on_all_images_at_once(tasks, pooled):
    method = learned(tasks, cps.Ridge(0.01), pooled=pooled)
    images, labels = all_images(tasks)
    features = method.features(images).double().numpy()
    centred = features - features.mean(axis=0)
    reference = RidgeRegression(alpha=0.01 * (centred**2).sum() / features.shape[1])
    names = [name for classes in method.classes for name in classes]
    reference.fit(features, np.equal.outer(labels, names).astype(float))
    expected = reference.predict(method.features(PROBES).double().numpy())
    np.testing.assert_allclose(method.scores(PROBES), expected, rtol=1e-6, atol=1e-6)


def test_the_nearest_mean_equals_scikit_learn(tasks):
    method = learned(tasks, cps.NearestMean())
    images, labels = all_images(tasks)
    reference = NearestCentroid().fit(method.features(images).double(), labels)
    tested, _ = all_images(tasks, "test")
    assert method.predict(tested) == reference.predict(method.features(tested).double()).tolist()


@BOTH
def test_the_order_of_tasks_and_images_does_not_matter(tasks, pooled):
    expected = learned(tasks, pooled=pooled)
    draws = torch.Generator().manual_seed(0)
    for order in (tasks, tasks[::-1], [*tasks[1:], tasks[0]]):
        shuffled = [take(task, torch.randperm(len(task.train[1]), generator=draws).tolist()) for task in order]
        assert_same(learned(shuffled, pooled=pooled), expected)


def test_negative_control_another_image_changes_the_scores(tasks):
    with pytest.raises(AssertionError):
        assert_same(learned([take(tasks[0], range(25)), *tasks[1:]]), learned(tasks))


@pytest.mark.parametrize("task", [0, 1, 2])
def test_a_forgotten_task_leaves_the_file_as_if_it_had_never_been_learned(tasks, tmp_path, task):
    others = [each for index, each in enumerate(tasks) if index != task]
    method = learned(tasks)
    before = content(method, tmp_path / "a")
    method.forget(task)
    assert method.classes == [each.classes for each in others]
    assert content(method, tmp_path / "a") == content(learned(others), tmp_path / "b") != before


def test_forgetting_every_task_leaves_an_empty_method(tasks, tmp_path):
    method = learned(tasks)
    for _ in tasks:
        method.forget(0)
    assert content(method, tmp_path / "a") == content(ClosedForm(SPACE, cps.LDA(0.1)), tmp_path / "b")
    with pytest.raises(RuntimeError, match="nothing has been learned yet"):
        method.predict(PROBES)
    method.learn(make_task(30, shape=(1, 5, 5)))  # images of another shape, since none is known


@BOTH
def test_more_images_of_known_classes_equal_having_had_them_at_once(tasks, pooled):
    early, late = zip(*map(halves, tasks), strict=True)
    method = learned(early, pooled=pooled)
    with pytest.raises(AssertionError):
        assert_same(method, learned(tasks, pooled=pooled))
    method.add(late[1])
    images, labels = all_images([late[2], late[0]])  # of two tasks, the later one first, in another order of classes
    method.add(cps.Task([21, 1, 20, 0], train=(images, labels)))
    assert_same(method, learned(tasks, pooled=pooled))


@BOTH
def test_sums_of_two_processes_merge_to_those_of_one(tasks, pooled):
    early, late = zip(*map(halves, tasks), strict=True)
    first = learned(early[:2], pooled=pooled)
    second = learned([late[1], tasks[2], replace(late[0], classes=late[0].classes[::-1])], pooled=pooled)
    first.merge(second)
    assert first.classes == [task.classes for task in tasks]
    assert_same(first, learned(tasks, pooled=pooled))
    second.merge(ClosedForm(SPACE, SHRUNK, pooled=pooled))  # an empty one changes nothing
    empty = ClosedForm(SPACE, SHRUNK, pooled=pooled)
    empty.merge(second)
    assert_same(empty, second)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda tasks: learned([make_task(1)]), "class 1 is in tasks of different classes"),
        (lambda tasks: learned(tasks, space=cps.RandomReLU(31)), "space is RandomReLU.size=30. and RandomReLU.size=31"),
        (lambda tasks: learned(tasks, flips=True), "flips is False and True"),
        (lambda tasks: learned([make_task(30, shape=(2, 6, 5))]), "input_shape is .2, 6, 6. and .2, 6, 5."),
    ],
)
def test_sums_that_do_not_belong_together_are_not_merged(tasks, tmp_path, other, message):
    method = learned(tasks)
    before = content(method, tmp_path / "a")
    with pytest.raises(ValueError, match=message):
        method.merge(other(tasks))
    assert content(method, tmp_path / "a") == before
    with pytest.raises(TypeError, match="must be a ClosedForm, got list"):
        method.merge([])


def test_sums_over_features_of_other_weights_are_not_merged(tasks):
    torch.manual_seed(0)
    backbone, other = conv_net(), conv_net()
    method = learned(tasks[:1], space=backbone)
    for empty_or_not in (ClosedForm(other), learned(tasks[1:], space=other)):
        with pytest.raises(ValueError, match="different weights cannot be merged"):
            empty_or_not.merge(method)
    same = ClosedForm(backbone, SHRUNK)
    same.merge(method)
    assert_same(same, method)


def test_images_of_several_shapes_in_one_task_are_rejected(monkeypatch):
    monkeypatch.setattr(closed_form, "BATCH", 2)
    images = [torch.randn(2, 6, 6)] * 4 + [torch.randn(2, 5, 6)] * 2
    method = ClosedForm(SPACE)
    with pytest.raises(ValueError, match="must have shape .2, 6, 6., as those before, got .2, 5, 6."):
        method.learn(cps.Task([0, 1], train=ListDataset(images, [0, 1] * 3)))
    assert method.classes == []
    method.learn(make_task(0, shape=(2, 5, 6)))  # the shape of the rejected task is not expected


@BOTH
def test_a_saved_method_goes_on_as_if_it_had_never_been_saved(tasks, tmp_path, pooled):
    learned(tasks[:2], flips=True, normalize=cps.Normalize((0.1, 0.2), (1.0, 2.0)), pooled=pooled).save(tmp_path / "a")
    method = ClosedForm.load(tmp_path / "a")
    method.learn(tasks[2])
    whole = learned(tasks, flips=True, normalize=cps.Normalize((0.1, 0.2), (1.0, 2.0)), pooled=pooled)
    assert content(method, tmp_path / "a") == content(whole, tmp_path / "b")
    assert method.predict(PROBES) == whole.predict(PROBES)


def test_mirror_images_are_added_to_the_sums_but_not_asked(tasks):
    images, labels = all_images(tasks[:1])
    both = cps.Task(tasks[0].classes, train=(torch.cat([images, images.flip(-1)]), labels * 2))
    assert_same(learned(tasks[:1], flips=True), learned([both]))
    with pytest.raises(ValueError, match="can be flipped"):
        learned([cps.Task([0, 1], train=(torch.randn(4, 7), [0, 1, 0, 1]))], flips=True)


def test_the_features_of_a_sealed_subnetwork_are_a_space(make_learner, tasks, tmp_path):
    learner = make_learner()
    learner.learn(tasks[0])
    backbone = learner.extract(0).backbone.cpu()
    method = learned(tasks, space=backbone)
    torch.testing.assert_close(method.features(PROBES), backbone.eval()(PROBES))
    assert method.kept()["weights"] > 0
    method.save(tmp_path / "a")
    with pytest.raises(ValueError, match="made with space a module, which files cannot hold; pass space=..."):
        ClosedForm.load(tmp_path / "a")
    assert_same(ClosedForm.load(tmp_path / "a", learner.extract(0).backbone.cpu()), method)
    with pytest.raises(cps.FileError, match="made with other weights"):
        ClosedForm.load(tmp_path / "a", conv_net())


def test_a_pretrained_backbone_is_a_space_that_later_training_does_not_change(tasks, tmp_path):
    torch.manual_seed(0)
    backbone = conv_net()
    method = learned(tasks[:2], space=cps.Pretrained(), backbone=backbone)
    method.save(tmp_path / "a")
    with pytest.raises(ValueError, match="pass backbone=..."):
        ClosedForm.load(tmp_path / "a")
    assert_same(ClosedForm.load(tmp_path / "a", backbone=backbone), method)
    before = method.scores(PROBES)
    nn.init.zeros_(backbone[0].weight)
    assert torch.equal(method.scores(PROBES), before)
    with pytest.raises(cps.FileError, match="made with other weights"):
        ClosedForm.load(tmp_path / "a", backbone=backbone)
    with pytest.raises(ValueError, match="pass backbone=..."):
        ClosedForm(cps.Pretrained()).learn(tasks[0])


def test_data_sets_and_tensors_give_the_same_sums(tasks, tmp_path):
    as_datasets = [replace(task, train=ListDataset(*task.train)) for task in tasks]
    assert content(learned(as_datasets), tmp_path / "a") == content(learned(tasks), tmp_path / "b")
    method = learned(tasks)
    method.add(as_datasets[1])
    twice = learned(tasks)
    twice.add(tasks[1])
    assert_same(method, twice)


def test_images_are_summed_in_small_batches(tasks, monkeypatch):
    expected, sizes = learned(tasks), []
    monkeypatch.setattr(closed_form, "BATCH", 7)
    features = ClosedForm.features
    monkeypatch.setattr(
        ClosedForm, "features", lambda self, images: sizes.append(len(images)) or features(self, images)
    )
    assert_same(learned(tasks), expected)
    assert max(sizes) == 7


@BOTH
def test_the_file_is_as_large_as_what_is_kept(tasks, tmp_path, pooled):
    method = learned(tasks, pooled=pooled)
    blocks = 1 if pooled else 3
    assert method.kept() == {"counts": 7 * 8, "means": 7 * 30 * 8, "covariances": blocks * 465 * 8, "weights": 0}
    _, tensors = (method.save(tmp_path / "a"), container.read(tmp_path / "a", "closed form"))[1]
    assert sum(value.nbytes for value in tensors.values()) == sum(method.kept().values())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"classes": [0, 30]}, ValueError, "class 0 was already learned, in task 0; add.task. adds images"),
        ({"classes": [30, 31, 32]}, ValueError, "class 32 has no training image"),
        ({"classes": [30, 30, 31]}, ValueError, "names a class twice"),
        ({"classes": []}, ValueError, "names no class"),
        ({"classes": [31]}, ValueError, "label 30 is not one of the task's classes"),
        ({"train": (torch.full((2, 2, 6, 6), torch.nan), [30, 31])}, ValueError, "NaN"),
        ({"train": (torch.randn(2, 2, 5, 6), [30, 31])}, ValueError, "must have shape .2, 6, 6., as those before"),
        ({"train": (torch.full((2, 2, 6, 6), 3.4e38), [30, 31])}, FloatingPointError, "NaN or infinite"),
    ],
)
@BOTH
def test_a_task_that_cannot_be_learned_changes_nothing(tasks, tmp_path, change, error, message, pooled):
    method = learned(tasks, pooled=pooled)
    before = content(method, tmp_path / "a")
    with pytest.raises(error, match=message):
        method.learn(replace(make_task(30), **change))
    assert content(method, tmp_path / "a") == before
    assert_same(method, learned(tasks, pooled=pooled))
    if "train" in change:  # the same images, as more of known classes
        images = replace(tasks[0], train=(change["train"][0], [0, 1]))
        with pytest.raises(error, match=message):
            method.add(images)
        assert content(method, tmp_path / "a") == before


def test_errors_say_what_to_do(tasks):
    method = learned(tasks[:1])
    with pytest.raises(ValueError, match="class 10 has not been learned; learn.task. learns new classes"):
        method.add(tasks[1])
    with pytest.raises(TypeError, match="must be a cps.Task, got Scenario"):
        method.learn(cps.split_by_class(tasks[0].train, sizes=1))
    for task in (1, -1):
        with pytest.raises(ValueError, match="must be an index below 1"):
            method.forget(task)
        with pytest.raises(ValueError, match="must be an index below 1"):
            method.predict(PROBES, task=task)
    with pytest.raises(TypeError, match="must be an integer index"):
        method.forget("first")
    with pytest.raises(ValueError, match="group_size must be an integer"):
        method.predict(PROBES, group_size=0)
    with pytest.raises(ValueError, match="must have shape .2, 6, 6."):
        method.predict(PROBES[:, :1])
    with pytest.raises(ValueError, match="pooled=False"):
        learned(tasks, pooled=True).forget(0)
    with pytest.raises(TypeError, match="space must be a space"):
        ClosedForm("pixels")
    with pytest.raises(TypeError, match="classifier must be a classifier"):
        ClosedForm(SPACE, "lda")
    with pytest.raises(ValueError, match="must return features of shape .*got .*6, 6"):
        ClosedForm(nn.Identity()).learn(tasks[0])


@pytest.mark.parametrize("classifier", [cps.LDA(), cps.NearestMean(), cps.Ridge()], ids=str)
def test_constant_features_and_single_images_give_finite_scores(classifier):
    images = torch.ones(6, 1, 4, 4)
    method = learned(
        [cps.Task([0, 1], train=(images, [0, 0, 0, 0, 0, 1])), cps.Task([2], train=(images[:1], [2]))], classifier
    )
    assert method.scores(images).isfinite().all()


def test_a_group_gets_the_class_inside_its_most_probable_task():
    # Image 0 is of task 0 by a small margin, image 1 of task 1 by a large one.
    scores = torch.tensor([[2.0, 0.0, 1.5, 1.0], [0.0, 1.0, 4.0, 5.0]])
    assert select_tasks(scores, [2, 2], torch.tensor([0, 1])).tolist() == [0, 1]
    assert select_tasks(scores, [2, 2], torch.tensor([0, 0])).tolist() == [1]
    assert best_classes(scores, [2, 2], torch.tensor([1, 1])).tolist() == [2, 3]
    assert best_classes(scores, [1, 3], torch.tensor([0, 0])).tolist() == [0, 0]


def test_single_images_get_their_best_class_and_groups_agree_on_a_task(tasks):
    method = learned(tasks)
    images, labels = tasks[1].test
    names = [name for classes in method.classes for name in classes]
    assert method.predict(images) == [names[index] for index in method.scores(images).argmax(dim=1).tolist()]
    noisy = images + 3 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    tasks_found = {(name // 10) for name in method.predict(noisy, group_size=len(noisy))}
    assert len(tasks_found) == 1 < len({name // 10 for name in method.predict(noisy)})
    assert {name // 10 for name in method.predict(noisy, task=2)} == {2}
    assert method.predict(images) == labels


@dataclass(frozen=True)
class OwnClassifier:
    """A classifier that files cannot name."""

    def fit(self, moments):
        return cps.NearestMean().fit(moments)


def test_a_classifier_that_a_file_cannot_hold_must_be_given_again(tasks, tmp_path):
    method = learned(tasks, OwnClassifier())
    method.save(tmp_path / "a")
    with pytest.raises(ValueError, match="which files cannot hold; pass classifier=..."):
        ClosedForm.load(tmp_path / "a")
    assert_same(ClosedForm.load(tmp_path / "a", classifier=OwnClassifier()), method)
    assert_same(ClosedForm.load(tmp_path / "a", classifier=cps.LDA(0.5)), learned(tasks, cps.LDA(0.5)))
    with pytest.raises(ValueError, match="has its own space"):
        ClosedForm.load(tmp_path / "a", conv_net(), classifier=OwnClassifier())


def test_the_suggested_space_is_named_in_the_file(tmp_path, monkeypatch):
    task = make_task(0, shape=(3, 20, 20))
    method = learned([task], None, None, pooled=True)
    assert method.space_name == "RandomPatches(filters=250, patch=6)"
    assert method.features(task.test[0]).shape[1] == 2000
    method.save(tmp_path / "a")
    assert sum(method.kept().values()) < 2**24
    monkeypatch.setattr(closed_form, "suggested_space", lambda shape: cps.RandomReLU(7))
    monkeypatch.setattr(closed_form, "SHRINKAGES", {})
    again = ClosedForm.load(tmp_path / "a")
    assert (again.space_name, again.classifier) == ("RandomPatches(filters=250, patch=6)", cps.LDA(0.001))
    assert again.predict(task.test[0]) == task.test[1]
    assert content(ClosedForm(), tmp_path / "a") == content(ClosedForm.load(tmp_path / "a"), tmp_path / "b")


@pytest.fixture(scope="module")
def sound(tasks, tmp_path_factory):
    path = tmp_path_factory.mktemp("closed-form") / "sound"
    learned(tasks).save(path)
    return path


def test_a_file_with_any_changed_byte_is_rejected_or_means_the_same(sound, tmp_path):
    expected = ClosedForm.load(sound).scores(PROBES)
    before, rejected = sound.read_bytes(), 0
    places = range(0, len(before), 97)
    for place in places:
        damaged = bytearray(before)
        damaged[place] ^= 1
        (tmp_path / "damaged").write_bytes(damaged)
        try:
            assert torch.equal(ClosedForm.load(tmp_path / "damaged").scores(PROBES), expected)
        except cps.FileError:
            rejected += 1
    assert rejected > 0.9 * len(places)
    (tmp_path / "damaged").write_bytes(before[:-1])
    with pytest.raises(cps.FileError):
        ClosedForm.load(tmp_path / "damaged")


def drop(name):
    return lambda header, tensors: (header.pop(name, None), tensors.pop(name, None))


def put(value, *names):
    def change(header, tensors):
        place = header if names[0] in header else tensors
        for name in names[:-1]:
            place = place[name]
        place[names[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("0/means"), "sums 0 is missing"),
        (drop("weights"), "damaged header"),
        (drop("normalize"), "damaged header"),
        (put("none", "classes"), "damaged header"),
        (put([[]], "classes"), "damaged header"),
        (put([[1], [2], [True]], "classes"), "damaged header"),
        (put([[0, 1], [1, 2, 3], [4, 5]], "classes"), "a class appears twice"),
        (put([[0, 1]], "classes"), "unexpected tensor"),
        (put([2, 6, -6], "input_shape"), "damaged header"),
        (put([2**15, 2**15], "input_shape"), "damaged header"),
        (put([], "input_shape"), "damaged header"),
        (put([2, 6, 7], "input_shape"), None),  # a space for images of that shape, with as many features
        (put([2, 0.5], "input_shape"), "damaged header"),
        (put({"type": "RandomReLU", "size": 31}, "space"), "it has sums of 30 features, its space gives 31"),
        (put({"type": "RandomReLU", "size": 10**9}, "space"), "damaged settings"),
        (lambda header, _: header.update(space={"type": "RandomPatches", "filters": 4, "patch": 6}, input_shape=[72]), "space that cannot process its images"),
        (put({"type": "LDA", "shrinkage": 0.1}, "space"), "damaged settings: space must be"),
        (put({"type": "Adam"}, "classifier"), "damaged settings"),
        (put({"type": "Flip"}, "classifier"), "damaged settings: classifier must be"),
        (put({"type": "Flip"}, "normalize"), "normalize must be a Normalize"),
        (put("abc", "weights"), "made with other weights"),
        (put(1, "flips"), "damaged header"),
        (put(torch.tensor([13.0, torch.nan]).double(), "0/counts"), "sums 0 have a wrong shape"),
        (put(torch.tensor([13.0, 0.0]).double(), "0/counts"), "sums 0 have a wrong shape"),
        (put(torch.tensor([13.0, 13.0]), "0/counts"), "sums 0 have a wrong shape"),
        (put(torch.zeros(2, 29).double(), "0/means"), "sums 0 have a wrong shape"),
        (put(torch.zeros(()).double(), "0/means"), "sums 0 have a wrong shape"),
        (put(torch.full((465,), torch.inf).double(), "1/covariances"), "sums 1 have a wrong shape"),
    ],
)  # fmt: skip
def test_a_hostile_file_with_valid_digests_is_rejected(sound, tmp_path, change, message):
    header, tensors = container.read(sound, "closed form")
    change(header, tensors)
    container.write(tmp_path / "hostile", "closed form", header, tensors)
    if message is None:
        assert ClosedForm.load(tmp_path / "hostile").input_shape == (2, 6, 7)
        return
    with pytest.raises(cps.FileError, match=message):
        ClosedForm.load(tmp_path / "hostile")


def test_a_file_of_another_kind_is_rejected(saved, sound, tmp_path):
    with pytest.raises(cps.FileError, match="is not a cps closed form file"):
        ClosedForm.load(saved[1])
    with pytest.raises(cps.FileError, match="is not a cps model file"):
        cps.load(sound)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        ClosedForm.load(tmp_path / "nothing")


def test_its_text_names_space_and_classifier(tasks):
    assert repr(learned(tasks[:1], cps.LDA(0.2), None)) == (
        "ClosedForm(RandomReLU(size=1000), LDA(shrinkage=0.2), tasks=1)"
    )
    assert repr(ClosedForm(conv_net(), cps.Ridge())) == "ClosedForm(Sequential, Ridge(penalty=0.0001), tasks=0)"


def test_the_default_classifier_depends_on_the_space_also_after_loading(tasks, tmp_path):
    spaces = {cps.RandomReLU(9): 0.1, cps.RandomPatches(4): 0.001, cps.Pretrained(): 0.5, conv_net(): 0.1}
    assert [ClosedForm(space).classifier for space in spaces] == [cps.LDA(share) for share in spaces.values()]
    method = learned(tasks, None, cps.RandomPatches(4))
    method.save(tmp_path / "a")
    assert ClosedForm.load(tmp_path / "a").classifier == cps.LDA(0.001)
    assert_same(ClosedForm.load(tmp_path / "a"), learned(tasks, cps.LDA(0.001), cps.RandomPatches(4)))
