"""A space that no task owns finds the task by a closed form of sums."""

import pytest
import torch

import cps
from cps.closed_form.sums import Moments, Sums
from cps.network.architectures import Architecture
from cps.selection.base import precompute_once
from cps.selection.shared_space import SHRINKAGES
from cps.storage.container import FileError
from samples import conv_net, make_task

SPACE = cps.RandomReLU(40)
FIRSTS = (0, 10, 20)


@pytest.fixture
def learner(make_learner):
    """Return a learner of three tasks of two classes."""
    learner = make_learner(selectors=(cps.SharedSpace(SPACE, cps.LDA(0.05)),))
    for first in FIRSTS:
        learner.learn(make_task(first))
    return learner


def class_scores(learner, images):
    """Return the log probabilities of all classes, by class name."""
    selector, evidence = learner.config.selectors[0], learner.evidence(images)
    precomputed = precompute_once(selector, learner.network.statistics("SharedSpace"))
    names = [name for classes in learner.classes for name in classes]
    parts = [selector.score_classes(evidence, precomputed, task) for task in range(len(learner.classes))]
    return dict(zip(names, torch.cat(parts, dim=1).unbind(1), strict=True))


def test_a_selector_passes_the_check():
    cps.check_selector(cps.SharedSpace())
    cps.check_selector(cps.SharedSpace(covariances=1))


def test_the_probabilities_of_all_classes_sum_to_one(learner):
    scores = torch.stack(list(class_scores(learner, make_task(0).test[0]).values()), dim=1)
    torch.testing.assert_close(scores.exp().sum(dim=1), torch.ones(len(scores), device=scores.device))


def test_the_class_is_that_of_lda_on_the_images_of_all_tasks_at_once(learner):
    tasks = [make_task(first) for first in FIRSTS]
    features = [learner.evidence(task.train[0]).features(SPACE) for task in tasks]
    names = [name for task in tasks for name in task.classes]
    labels = [torch.tensor([task.classes.index(label) for label in task.train[1]]) for task in tasks]
    together = Sums.of(
        [(torch.cat(features), torch.cat([own + 2 * task for task, own in enumerate(labels)]))], classes=6
    )
    images = torch.cat([task.test[0] for task in tasks])
    expected = cps.LDA(0.05).fit(Moments.of([together]))(learner.evidence(images).features(SPACE).double())
    scores = class_scores(learner, images)
    found = torch.stack([scores[name] for name in names], dim=1)
    assert torch.equal(found.argmax(dim=1), expected.argmax(dim=1))
    ratio = (found - found.mean(dim=1, keepdim=True)) / (expected - expected.mean(dim=1, keepdim=True))
    torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio), rtol=1e-3, atol=1e-3)  # one temperature


def test_the_order_of_tasks_does_not_matter(learner, make_learner):
    other = make_learner(selectors=learner.config.selectors)
    for first in reversed(FIRSTS):
        other.learn(make_task(first))
    images = torch.cat([make_task(first).test[0] for first in FIRSTS])
    one, two = class_scores(learner, images), class_scores(other, images)
    best = [
        max(scores, key=lambda name, i=i, scores=scores: float(scores[name][i]))
        for scores in (one, two)
        for i in range(len(images))
    ]
    assert best[: len(images)] == best[len(images) :]
    assert len(set(best)) == 6


@pytest.mark.parametrize("forgotten", range(3))
def test_the_sums_are_as_if_a_forgotten_task_had_never_been_learned(learner, make_learner, forgotten):
    never = make_learner(selectors=learner.config.selectors)
    for task, first in enumerate(FIRSTS):
        if task != forgotten:
            never.learn(make_task(first))
    assert len(learner.network.statistics("SharedSpace")) == 3
    learner.forget(forgotten)
    for kept, expected in zip(
        learner.network.statistics("SharedSpace"), never.network.statistics("SharedSpace"), strict=True
    ):
        assert {"means", "counts", "factors"} <= set(kept)
        for name in ("means", "counts", "factors"):
            assert torch.equal(kept[name], expected[name])


def test_only_the_first_tasks_keep_a_sum_for_the_covariance(make_learner):
    learner = make_learner(selectors=(cps.SharedSpace(SPACE, covariances=2),))
    for first in FIRSTS:
        learner.learn(make_task(first))

    def keepers():
        return ["factors" in kept for kept in learner.network.statistics("SharedSpace")]

    assert keepers() == [True, True, False]
    learner.forget(1)
    learner.forget(0)
    assert keepers() == [False]
    assert len(learner.predict(make_task(20).test[0]).classes) == 12  # by class means alone
    learner.learn(make_task(30))
    assert keepers() == [False, True]


def test_a_saved_model_scores_the_same(learner, tmp_path):
    images = make_task(10).test[0]
    learner.save(tmp_path / "model.cps")
    loaded = cps.load(tmp_path / "model.cps", conv_net(), fabric=learner.fabric)
    assert loaded.config.selectors == learner.config.selectors
    before, after = class_scores(learner, images), class_scores(loaded, images)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_features_of_the_pretrained_backbone_never_change(make_learner, tmp_path):
    space = cps.Pretrained()
    learner = make_learner(Architecture("small", 2), selectors=(cps.SharedSpace(space),))
    task = make_task(0)
    learner.network.set_input((2, 6, 6), (-3.0, 3.0))
    before = learner.network.features([task.test[0]], space)
    learner.learn(task)
    assert torch.equal(learner.evidence(task.test[0]).features(space), before)
    trained = learner.network.backbone.eval()(learner.network.pixels(task.test[0]))
    assert not torch.allclose(trained, before, atol=1e-2)  # the backbone itself has been trained
    learner.save(tmp_path / "model.cps")
    loaded = cps.load(tmp_path / "model.cps", fabric=learner.fabric)
    assert torch.equal(loaded.evidence(task.test[0]).features(space), before)


def test_pretrained_weights_that_were_not_kept_raise(learner, make_learner):
    with pytest.raises(ValueError, match="were not kept"):
        learner.evidence(make_task(0).test[0]).features(cps.Pretrained())
    late = make_learner(selectors=(cps.MaxOutput(),))
    late.learn(make_task(0))
    late.configure(selectors=(cps.SharedSpace(cps.Pretrained()),))
    with pytest.raises(ValueError, match="from the first task on"):
        late.learn(make_task(10))
    assert len(late.classes) == 1


def test_a_learner_without_tasks_can_still_choose_the_pretrained_space(make_learner):
    learner = make_learner(selectors=(cps.MaxOutput(),))
    learner.configure(selectors=(cps.SharedSpace(cps.Pretrained()),))
    learner.learn(make_task(0))
    assert len(learner.predict(make_task(0).test[0]).classes) == 12


@pytest.mark.parametrize(
    "changed",
    [cps.SharedSpace(SPACE, cps.LDA(0.1)), cps.SharedSpace(cps.RandomReLU(41), cps.LDA(0.05)), cps.SharedSpace(SPACE)],
)
def test_another_space_or_classifier_than_the_learned_one_raises(learner, changed):
    images = make_task(0).test[0]
    assert learner.predict(images).classes
    if changed.classifier == cps.LDA(0.1):  # as many losses, so the temperature fits approximately
        assert learner.predict(images, selector=changed).classes
        return
    with pytest.raises(ValueError, match="the space and the classifier that it learned all tasks with"):
        learner.predict(images, selector=changed)


def test_a_file_with_other_numbers_of_classes_is_refused(learner, tmp_path):
    kept = learner.network.statistics("SharedSpace")[1]
    kept["counts"], kept["means"] = torch.ones(3), torch.cat([kept["means"], kept["means"][:1]])
    learner.save(tmp_path / "odd.cps")
    with pytest.raises(FileError, match="damaged statistics of SharedSpace: task 1 has 2 classes, but statistics of 3"):
        cps.load(tmp_path / "odd.cps", conv_net(), fabric=learner.fabric)


def test_a_file_with_wide_means_and_no_covariance_is_refused_without_a_matrix_of_that_width(learner, tmp_path):
    for kept in learner.network.statistics("SharedSpace"):
        kept["means"] = torch.zeros(2, 100_000)  # a covariance would take 80 GB
        del kept["factors"], kept["factor classes"]
    learner.save(tmp_path / "odd.cps")
    with pytest.raises(FileError, match="damaged statistics of SharedSpace"):
        cps.load(tmp_path / "odd.cps", conv_net(), fabric=learner.fabric)


def test_wrong_settings_raise():
    with pytest.raises(TypeError, match=r"space of SharedSpace must be a space such as cps.RandomPatches\(\)"):
        cps.SharedSpace("patches")
    with pytest.raises(TypeError, match=r"classifier of SharedSpace must be a cps.LDA or None"):
        cps.SharedSpace(classifier=cps.Ridge())
    with pytest.raises(ValueError, match="covariances of SharedSpace must be 1 or more, got 0"):
        cps.SharedSpace(covariances=0)


def test_a_space_with_nan_features_raises_and_nothing_is_learned(make_learner):
    class NaNs(torch.nn.Module):
        def forward(self, pixels):
            return pixels.flatten(1) * torch.nan

    class NaNSpace:
        def make(self, shape, pretrained):
            return NaNs()

    learner = make_learner(selectors=(cps.SharedSpace(NaNSpace()),))
    with pytest.raises(FloatingPointError, match="NaN"):
        learner.learn(make_task(0))
    assert learner.classes == []


def test_constant_images_and_a_class_with_one_image_are_learned(make_learner):
    learner = make_learner(selectors=(cps.SharedSpace(SPACE),))
    learner.learn(cps.Task([0, 1], train=(torch.zeros(5, 2, 6, 6), [0, 0, 0, 0, 1])))
    scores = torch.stack(list(class_scores(learner, torch.zeros(2, 2, 6, 6)).values()), dim=1)
    assert scores.isfinite().all()


@pytest.mark.parametrize(
    "damaged",
    [
        {"scatter": torch.zeros(819)},
        {"factors": torch.zeros(3, 39)},
        {"factors": torch.zeros(3, 40), "factor classes": torch.zeros(2)},
        {"means": torch.zeros(2, 100_000), "factors": torch.zeros(1, 100_000)},  # the scatter would take 80 GB
    ],
)
def test_a_file_whose_sums_have_another_size_is_refused(learner, tmp_path, damaged):
    kept = learner.network.statistics("SharedSpace")[0]
    if "scatter" in damaged:
        del kept["factors"], kept["factor classes"]
    kept |= damaged
    learner.save(tmp_path / "odd.cps")
    with pytest.raises(FileError, match="damaged statistics of SharedSpace"):
        cps.load(tmp_path / "odd.cps", conv_net(), fabric=learner.fabric)


@pytest.mark.parametrize(("noise_dims", "expected"), [(0, 0.001), (300, 0.1)])
def test_leave_one_out_scores_choose_the_shrinkage(make_learner, noise_dims, expected):
    class Columns(torch.nn.Module):
        def forward(self, pixels):
            return pixels.flatten(1)[:, : 4 + noise_dims]

    class Space:
        def make(self, shape, pretrained):
            return Columns()

    selector = cps.SharedSpace(Space())
    draws = torch.Generator().manual_seed(0)
    labels = torch.arange(200) % 2
    images = torch.randn(200, 2, 13, 13, generator=draws)
    mixed = images.flatten(1)[:, :4] @ torch.tensor([[1.0, 0.99, 0, 0], [0, 0.1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1.0]])
    images.flatten(1)[:, :4] = mixed + 0.2 * labels[:, None] * torch.tensor([1.0, -1.0, 0, 0])
    learner = make_learner(selectors=(selector,))
    learner.learn(cps.Task([0, 1], train=(images, labels.tolist())))
    losses = learner.network.statistics("SharedSpace")[0]["log losses"].amin(dim=1)
    assert SHRINKAGES[int(losses.argmin())] == expected


def test_a_space_of_your_own_can_be_given_again_when_a_model_is_loaded(make_learner, tmp_path):
    class Means(torch.nn.Module):
        def forward(self, pixels):
            return pixels.mean(dim=1).flatten(1)

    class OwnSpace:
        def make(self, shape, pretrained):
            return Means()

    learner, images = make_learner(selectors=(cps.SharedSpace(OwnSpace()),)), make_task(0).test[0]
    learner.learn(make_task(0))
    learner.save(tmp_path / "model.cps")
    with pytest.raises(ValueError, match="which files cannot hold; pass selectors="):
        cps.load(tmp_path / "model.cps", conv_net(), fabric=learner.fabric)
    again = (cps.SharedSpace(OwnSpace()),)
    loaded = cps.load(tmp_path / "model.cps", conv_net(), fabric=learner.fabric, selectors=again)
    assert loaded.predict(images).classes == learner.predict(images).classes


def test_the_weights_as_they_came_survive_if_all_tasks_are_forgotten(make_learner):
    learner = make_learner(selectors=(cps.SharedSpace(cps.Pretrained()),))
    before = {name: value.clone() for name, value in learner.network.pretrained.items()}
    learner.learn(make_task(0))
    learner.forget(0, fresh=conv_net())
    learner.configure(rounds=2)
    assert not all(torch.equal(learner.network.weights[name], value) for name, value in before.items())
    assert all(torch.equal(learner.network.pretrained[name], value) for name, value in before.items())
