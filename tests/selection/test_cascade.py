"""The cascade finds the task of a single image."""

import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal

import cps
from cps.closed_form.spaces import root_normalize
from cps.closed_form.sums import unpack
from cps.network.outputs import Evidence, Outputs
from cps.network.subnetwork import Subnetwork
from cps.selection.base import precompute_once
from cps.selection.cascade import principal_components
from cps.selection.predict import select
from samples import make_task

TASKS, CLASSES, FEATURES = 4, 3, 12


def simulate(seed=0):
    """Return subnetworks, and a function that draws their outputs for images of a task.

    Every class has its own mean features in every subnetwork, and logits are noise. So maximum logits cannot separate
    tasks, but the features of later tasks in earlier subnetworks can.
    """
    draws = torch.Generator().manual_seed(seed)
    heads = torch.randn(TASKS, CLASSES, FEATURES, generator=draws)
    means = torch.randn(TASKS, TASKS, CLASSES, FEATURES, generator=draws).abs()  # by subnetwork, task and class
    subnetworks = [
        Subnetwork(tuple(range(10 * t, 10 * t + CLASSES)), {}, {}, {"weight": heads[t], "bias": torch.zeros(CLASSES)})
        for t in range(TASKS)
    ]

    def draw(task, tasks, images):
        """Return the evidence of the first `tasks` subnetworks for images of a task, and their labels."""
        labels = torch.arange(images) % CLASSES
        outputs = []
        for s in range(tasks):
            features = (means[s, task][labels] + 0.2 * torch.randn(images, FEATURES, generator=draws)).clamp(min=0)
            logits = torch.randn(images, CLASSES, generator=draws)
            outputs.append(Outputs(features, logits))
        return Evidence.of(outputs), labels

    return subnetworks, draw


def observe_all(selector, subnetworks, draw, images=60):
    """Return the statistics that a selector keeps when it learns the tasks in order."""
    statistics = []
    for task, subnetwork in enumerate(subnetworks):
        evidence, labels = draw(task, task + 1, images)
        statistics.append(selector.observe(subnetwork, evidence, labels, statistics))
    return statistics


def task_accuracy(selector, subnetworks, draw):
    """Return the share of images whose task the selector finds."""
    statistics = observe_all(selector, subnetworks, draw)
    found = [select(selector, draw(t, TASKS, 60)[0], statistics, torch.arange(60)).tasks == t for t in range(TASKS)]
    return torch.cat(found).float().mean()


def test_the_cascade_finds_tasks_by_the_features_of_later_images_in_earlier_subnetworks():
    assert task_accuracy(cps.Cascade(), *simulate()) > 0.95
    assert task_accuracy(cps.MaxOutput(), *simulate()) < 0.5  # logits carry no information about the task


def test_a_cascade_with_pooled_covariances_is_a_chain_of_linear_discriminants():
    subnetworks, draw = simulate()
    selector = cps.Cascade(
        size=4, shrinkage=0.1, covariance_pooling=1.0, mean_contraction=1.0, logit_weight=0.0, temperature=2.0
    )
    statistics = observe_all(selector, subnetworks, draw)
    evidence, _ = draw(1, TASKS, 30)
    reduced = torch.cat(
        [root_normalize(o.features) @ kept["components"] for o, kept in zip(evidence, statistics, strict=True)], 1
    )
    means = [kept["means"] for kept in statistics]
    spreads = [unpack(kept["covariance"], kept["means"].shape[1]) for kept in statistics]
    rejected, expected = torch.zeros(30), []
    for stage, outputs in enumerate(evidence):
        n = means[stage].shape[1]
        centres = torch.cat([values[:, :n] for values in means[stage:]])
        spread = torch.stack([values[:n, :n] for values in spreads[stage:]]).mean(dim=0)
        spread = spread + 0.1 * spread.diagonal().mean() * torch.eye(n)
        weights = torch.linalg.solve(spread, centres.T)
        likelihoods = (reduced[:, :n] @ weights - (centres.T * weights).sum(dim=0) / 2) / 2.0
        share = outputs.logits.log_softmax(dim=1).amax(dim=1)
        if stage == TASKS - 1:
            expected.append(rejected + share)
            break
        odds = likelihoods[:, :CLASSES].logsumexp(dim=1) - likelihoods[:, CLASSES:].logsumexp(dim=1)
        expected.append(rejected + nn.functional.logsigmoid(odds) + share)
        rejected = rejected + nn.functional.logsigmoid(-odds)
    found = selector(evidence, statistics, torch.arange(30))
    torch.testing.assert_close(found, torch.stack(expected, 1), rtol=1e-3, atol=1e-3)
    for other in (
        replace(selector, covariance_pooling=0.5),
        replace(selector, mean_contraction=0.5),
    ):  # the other settings make a difference
        assert not torch.allclose(other(evidence, statistics, torch.arange(30)), found, rtol=1e-2, atol=1e-2)


def test_a_cascade_with_separate_covariances_compares_normal_distributions():
    subnetworks, draw = simulate()
    selector = cps.Cascade(size=4, shrinkage=0.1, covariance_pooling=0.4, logit_weight=0.0, temperature=1.0)
    statistics = observe_all(selector, subnetworks[:2], draw)
    evidence, _ = draw(0, 2, 30)
    outputs = next(iter(evidence))
    reduced = root_normalize(outputs.features) @ statistics[0]["components"]
    n = reduced.shape[1]
    spreads = [unpack(kept["covariance"], kept["means"].shape[1])[:n, :n] for kept in statistics]
    common = (spreads[0] + spreads[1]) / 2
    ridge = 0.1 * common.diagonal().mean() * torch.eye(n)
    likelihoods = []
    for kept, spread in zip(statistics, spreads, strict=True):
        normal = [MultivariateNormal(mean[:n], 0.4 * common + 0.6 * spread + ridge) for mean in kept["means"]]
        likelihoods.append(torch.stack([one.log_prob(reduced) for one in normal]).logsumexp(dim=0))
    found = selector(evidence, statistics, torch.arange(30))[:, 0] - outputs.logits.log_softmax(dim=1).amax(dim=1)
    expected = nn.functional.logsigmoid(likelihoods[0] - likelihoods[1])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("covariance_pooling", 1.2), ("covariance_pooling", -0.1), ("mean_contraction", 0.0), ("mean_contraction", 1.1), ("size", 0), ("shrinkage", 0.0),
        ("temperature", -1.0), ("logit_weight", -0.5),
    ],
)  # fmt: skip
def test_settings_out_of_range_raise_and_are_named(name, wrong):
    with pytest.raises(ValueError, match=f"^{name} of Cascade must be .*, got {wrong}$"):
        cps.Cascade(**{name: wrong})


def test_the_size_of_the_statistics_does_not_depend_on_the_number_of_images():
    few, many = (observe_all(cps.Cascade(size=4), *simulate(), images=images) for images in (30, 300))
    assert [{k: v.shape for k, v in kept.items()} for kept in few] == [
        {k: v.shape for k, v in kept.items()} for kept in many
    ]
    assert [kept["means"].shape for kept in few] == [(CLASSES, 4 * (task + 1)) for task in range(TASKS)]


def test_scores_of_the_first_tasks_change_when_later_tasks_are_learned():
    subnetworks, draw = simulate()
    selector = cps.Cascade()
    statistics = observe_all(selector, subnetworks, draw)
    evidence, _ = draw(0, TASKS, 30)
    before = selector(evidence.first(2), statistics[:2], torch.arange(30))
    assert before.shape == (30, 2)
    after = selector(evidence, statistics, torch.arange(30))
    assert not torch.equal(after[:, :2], before)  # later tasks have shown which images belong to them


def test_a_learner_with_a_cascade_predicts_the_same_after_save_and_load(learner, tmp_path):
    learner.save(tmp_path / "model.cps")
    loaded = cps.load(tmp_path / "model.cps", cps.SmallConvNet(2, (8, 12)), fabric=learner.fabric)
    images = make_task(10, test=30).test[0]
    assert loaded.predict(images).classes == learner.predict(images).classes
    assert loaded.config.selectors == learner.config.selectors


def test_a_cascade_without_a_task_equals_one_that_never_saw_it():
    subnetworks, draw = simulate()
    selector, removed = cps.Cascade(), 1

    def without_removed(evidence):
        return Evidence.of([outputs for task, outputs in enumerate(evidence) if task != removed])

    all_tasks, other_tasks = [], []
    for task in range(TASKS):
        evidence, labels = draw(task, task + 1, 60)
        all_tasks.append(selector.observe(subnetworks[task], evidence, labels, all_tasks))
        if task != removed:
            others = without_removed(evidence)
            other_tasks.append(selector.observe(subnetworks[task], others, labels, other_tasks))
    for kept, expected in zip(selector.without_task(all_tasks, removed), other_tasks, strict=True):
        assert {name: value.shape for name, value in kept.items()} == {n: v.shape for n, v in expected.items()}
        torch.testing.assert_close(kept, expected)


def test_cached_computations_are_not_used_for_other_statistics_or_settings():
    subnetworks, draw = simulate()
    selector = cps.Cascade()
    statistics = observe_all(selector, subnetworks, draw)
    evidence, _ = draw(0, TASKS, 30)
    first = selector(evidence, statistics, torch.arange(30))
    assert torch.equal(selector(evidence, statistics, torch.arange(30)), first)
    changed = [{**statistics[0], "means": statistics[0]["means"] + 1}, *statistics[1:]]
    assert not torch.allclose(selector(evidence, changed, torch.arange(30)), first)
    assert not torch.allclose(cps.Cascade(temperature=1.0)(evidence, statistics, torch.arange(30)), first)
    assert torch.equal(selector(evidence, statistics, torch.arange(30)), first)


def test_a_cascade_without_statistics_of_earlier_tasks_raises_before_training(make_learner):
    learner = make_learner(selectors=(cps.MaxOutput(),))
    learner.learn(make_task(0))
    learner.configure(selectors=(cps.Cascade(),))
    with pytest.raises(ValueError, match="from the first task on"):
        learner.learn(make_task(10))


def test_a_covariance_of_the_wrong_size_raises_before_memory_is_allocated():
    subnetworks, draw = simulate()
    statistics = observe_all(cps.Cascade(), subnetworks, draw)
    hostile = [{**statistics[0], "means": torch.zeros(2, 500_000)}, *statistics[1:]]
    with pytest.raises(ValueError, match="entries, got"):
        cps.Cascade()(draw(0, TASKS, 3)[0], hostile, torch.arange(3))


def test_scores_by_a_graph_are_the_same_and_only_the_last_graph_is_kept(make_learner, monkeypatch):
    made = []

    class Uncaptured:  # on a GPU the function is captured as a graph
        def __init__(self, function):
            self.function = function
            made.append(self)

        def __call__(self, *inputs):
            return self.function(*inputs)

    monkeypatch.setattr("cps.selection.cascade.CapturedFunction", Uncaptured)
    cascade, images = cps.Cascade(), make_task(0).test[0]
    learner = make_learner(selectors=(cascade,))
    for first in (0, 10, 20):
        learner.learn(make_task(first))
        statistics, evidence = learner.network.statistics("Cascade"), list(learner.evidence(images))
        for _ in range(2):
            precomputed = precompute_once(cascade, statistics)
            by_graph = cascade._score_by_graph(evidence, precomputed, statistics)
            assert torch.equal(by_graph, cascade.score_images(evidence, precomputed))
    assert len(made) == 3
    first = weakref.ref(made.pop(0))
    assert first() is None


@pytest.mark.parametrize(("images", "features"), [(30, 1100), (400, 1500)])
def test_principal_components_of_many_features_are_found_without_the_full_covariance(images, features, monkeypatch):
    draws = torch.Generator().manual_seed(0)
    mixed = torch.randn(images, 20, generator=draws) @ torch.randn(20, features, generator=draws)
    inputs = root_normalize(mixed + torch.randn(images, features, generator=draws))
    _, exact = torch.linalg.eigh((inputs - inputs.mean(0)).T.double().cov())
    sizes, real = [], torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: sizes.append(len(matrix)) or real(matrix))
    found = principal_components(inputs, 8)
    assert sizes == [16]
    torch.testing.assert_close(found.T @ found, torch.eye(8), atol=1e-5, rtol=0)
    assert inputs.matmul(found).var(0).sum() > 0.999 * inputs.double().matmul(exact[:, -8:]).var(0).sum()
    assert torch.equal(found, principal_components(inputs, 8))
