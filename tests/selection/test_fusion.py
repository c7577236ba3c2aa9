"""The fusion multiplies what a shared space, the cascade and the subnetworks say, and runs only likely subnetworks."""

import gc
from dataclasses import replace
from itertools import product

import pytest
import torch
from studies.fusion_settings import safest_weights

import cps
from cps.runtime.process_state import PRECOMPUTED
from cps.selection.base import precompute_once
from cps.selection.fusion import DEFAULT_WEIGHTS, WEIGHTS
from cps.selection.predict import predict, run_needed
from samples import ROUNDING, conv_net, make_task

FUSION = cps.Fusion(cps.SharedSpace(cps.RandomReLU(40)), cps.Cascade(size=8))
FIRSTS = (0, 10, 20, 30)


@pytest.fixture(scope="module")
def learner(fabric):
    """Return a learner of four tasks of two classes; tests must not change it."""
    training = cps.Training(8, cps.Adam(1e-2), batch_size=16)
    torch.manual_seed(0)
    learner = cps.Learner(conv_net(), rounds=1, train=training, retrain=training, selectors=(FUSION,), fabric=fabric)
    for first in FIRSTS:
        learner.learn(make_task(first))
    return learner


IMAGES = torch.cat([make_task(first).test[0] for first in FIRSTS])
CLASSES = [label for first in FIRSTS for label in make_task(first).test[1]]


def scores_of(learner, selector, images=IMAGES):
    evidence = learner.evidence(images)
    groups = torch.arange(len(images), device=learner.network.device)
    run_needed(selector, evidence, learner.network.statistics("Fusion"), groups)
    return selector(evidence, learner.network.statistics("Fusion"), groups), evidence


def test_a_selector_passes_the_check():
    cps.check_selector(cps.Fusion())
    cps.check_selector(cps.Fusion(cascade_tasks=0))
    cps.check_selector(cps.Fusion(cascade_tasks=0, certainty=1.0))


def test_the_score_of_a_task_is_that_of_its_most_probable_class(learner):
    statistics = learner.network.statistics("Fusion")
    shared, cascade = (
        [{n.removeprefix(part): v for n, v in kept.items() if n.startswith(part)} for kept in statistics]
        for part in ("shared ", "cascade ")
    )
    scores, evidence = scores_of(learner, FUSION)
    in_space = precompute_once(FUSION.shared, shared)
    by_task = FUSION.cascade(evidence, cascade, torch.arange(len(IMAGES), device=scores.device))
    for task, outputs in enumerate(evidence):
        own = outputs.logits.log_softmax(dim=1)
        classes = FUSION.shared.score_classes(evidence, in_space, task) + DEFAULT_WEIGHTS[1] * own
        torch.testing.assert_close(scores[:, task], classes.amax(dim=1) + DEFAULT_WEIGHTS[0] * by_task[:, task])


def test_the_shared_space_corrects_the_class_that_a_subnetwork_confuses(learner):
    found = learner.predict(IMAGES)
    evidence = learner.evidence(IMAGES)
    inverted = [type(outputs)(outputs.features, -outputs.logits) for outputs in evidence]  # always the wrong class
    wrong = type(evidence).of(inverted, evidence.features)
    groups = torch.arange(len(IMAGES), device=learner.network.device)
    correct = {
        weight: sum(
            name == label
            for name, label in zip(
                predict(learner.network, wrong, replace(FUSION, task_weight=0.0, class_weight=weight), groups).classes,
                CLASSES,
                strict=True,
            )
        )
        for weight in (0.0, 100.0)
    }
    assert sum(name == label for name, label in zip(found.classes, CLASSES, strict=True)) > 40
    assert correct[0.0] > 40
    assert correct[100.0] < 24


def test_with_many_tasks_only_the_likely_subnetworks_run(learner):
    few = replace(FUSION, cascade_tasks=3, certainty=0.9, most_subnetworks=2)
    scores, evidence = scores_of(learner, few)
    runs = sum(len(evidence.ran(task)) for task in range(4))
    assert len(IMAGES) <= runs <= 2 * len(IMAGES)
    all_scores, all_evidence = scores_of(learner, replace(few, certainty=1.0))
    assert sum(len(all_evidence.ran(task)) for task in range(4)) == 4 * len(IMAGES)
    assert torch.equal(scores.argmax(dim=1), all_scores.argmax(dim=1))
    for task in range(4):
        images = evidence.ran(task)
        torch.testing.assert_close(scores[images, task], all_scores[images, task], rtol=1e-3, atol=1e-3)


def test_a_certainty_that_one_task_reaches_runs_one_subnetwork(learner):
    _, evidence = scores_of(learner, replace(FUSION, cascade_tasks=0, certainty=1e-6))
    assert sum(len(evidence.ran(task)) for task in range(4)) == len(IMAGES)


def test_the_images_of_a_group_run_the_same_subnetworks(learner):
    selector = replace(FUSION, cascade_tasks=0)
    groups = torch.arange(len(IMAGES), device=learner.network.device) // 12
    needed = selector.needed(learner.evidence(IMAGES), learner.network.statistics("Fusion"), groups)
    assert all(bool((rows == rows[0]).all()) for rows in needed.split(12))
    assert learner.predict(IMAGES, group_size=12, selector=selector).classes == CLASSES


def test_tasks_beyond_the_limit_keep_nothing_of_the_cascade(make_learner):
    learner = make_learner(selectors=(replace(FUSION, cascade_tasks=2),))
    for first in FIRSTS[:3]:
        learner.learn(make_task(first))

    def has_cascade():
        return [any(name.startswith("cascade") for name in kept) for kept in learner.network.statistics("Fusion")]

    assert has_cascade() == [True, True, False]
    before = learner.network.subnetworks
    learner.forget(2)
    assert has_cascade() == [True, True]
    assert learner.predict(IMAGES[:12]).classes
    learner.network.subnetworks = before
    learner.forget(0)
    assert has_cascade() == [True, False]
    assert learner.predict(IMAGES[:12]).classes  # without the cascade, since a task has no statistics of it
    learner.learn(make_task(30))
    assert has_cascade() == [True, False, False]


def test_learning_beyond_the_limit_runs_no_earlier_subnetwork(make_learner, monkeypatch):
    learner = make_learner(selectors=(replace(FUSION, cascade_tasks=1), cps.MaxOutput()))
    learner.learn(make_task(0))
    ran = []
    outputs = learner.network.outputs
    monkeypatch.setattr(
        learner.network,
        "outputs",
        lambda batches, tasks, features: ran.extend(tasks) or outputs(batches, tasks, features),
    )
    learner.learn(make_task(10))
    learner.learn(make_task(20))
    assert sorted(set(ran)) == [1, 2]


@pytest.mark.parametrize("selector", [FUSION, replace(FUSION, cascade_tasks=0)], ids=["cascade", "likely"])
def test_streams_rejection_and_files_work(learner, selector, tmp_path):
    stream = learner.stream(selector=selector)
    assert stream.predict(IMAGES[:12]).classes == CLASSES[:12]
    assert stream.predict(IMAGES[12:24]).classes[1:] == CLASSES[13:24]  # the first one may be taken for an outlier
    unknown = learner.predict(10 * torch.randn(6, 2, 6, 6), selector=selector, reject=0.2)
    assert len(unknown.classes) == 6
    learner.save(tmp_path / "model.cps")
    loaded = cps.load(tmp_path / "model.cps", conv_net(), fabric=learner.fabric)
    expected = learner.predict(IMAGES, selector=selector)
    found = loaded.predict(IMAGES, selector=selector)
    assert found.classes == expected.classes
    assert torch.equal(found.task_scores, expected.task_scores)


def test_wrong_settings_raise():
    with pytest.raises(TypeError, match=r"shared of Fusion must be a cps.SharedSpace"):
        cps.Fusion(cps.Cascade())
    with pytest.raises(TypeError, match=r"cascade of Fusion must be a cps.Cascade"):
        cps.Fusion(cascade=None)
    with pytest.raises(ValueError, match="task_weight of Fusion must be a finite number, 0 or more, or None"):
        cps.Fusion(task_weight=-1.0)
    with pytest.raises(ValueError, match="class_weight of Fusion must be a finite number, 0 or more, or None"):
        cps.Fusion(class_weight=True)
    with pytest.raises(ValueError, match=r"certainty of Fusion must be in \(0, 1\]"):
        cps.Fusion(certainty=0.0)
    with pytest.raises(ValueError, match="most_subnetworks of Fusion must be 1 or more"):
        cps.Fusion(most_subnetworks=0)


def test_some_outputs_are_rows_of_all_outputs_in_any_order(learner):
    every = learner.evidence(IMAGES)[1]
    evidence = learner.evidence(IMAGES)
    for images in (torch.tensor([5, 2, 9]), torch.tensor([7, 2]), torch.tensor([2])):
        torch.testing.assert_close(evidence.some(1, images).features, every.features[images.to(every.features.device)])
    assert evidence.ran(1).tolist() == [2, 5, 7, 9]
    assert not torch.allclose(every.features[5], every.features[2])


def test_images_in_several_batches_run_only_the_needed_rows(learner, monkeypatch):
    many = IMAGES.repeat(12, 1, 1, 1)  # more than a batch
    needed = torch.zeros(len(many), 4, dtype=torch.bool)
    needed[[3, 300, 301], 2] = True
    evidence = learner.evidence(many)
    prepared = []
    pixels = learner.network.pixels
    monkeypatch.setattr(learner.network, "pixels", lambda images: prepared.append(len(images)) or pixels(images))
    evidence.compute_some(needed)
    assert sum(prepared) == 3
    assert evidence.ran(2).tolist() == [3, 300, 301]
    expected = learner.evidence(many[[3, 300, 301]])[2]
    torch.testing.assert_close(
        evidence.some(2, torch.tensor([3, 300, 301])).logits, expected.logits, rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("weight", [0.0, 0.25])
@pytest.mark.parametrize("tasks", [[0, 1, 2, 1, 0], [1, 1, 1, 1, 1]], ids=["all tasks", "the smallest task"])
def test_scores_of_pairs_are_those_of_all_images(make_learner, tasks, weight):
    learner = make_learner(selectors=(replace(FUSION, class_weight=weight, task_weight=0.5),))
    for first, classes in ((0, 3), (10, 2), (20, 3)):
        learner.learn(make_task(first, classes=classes))
    images, tasks = torch.tensor([0, 3, 3, 7, 9]), torch.tensor(tasks)
    assert learner.predict(IMAGES[:12], group_size=12).classes  # of one task
    for selector in (learner.config.selectors[0], learner.config.selectors[0].shared):
        evidence, statistics = learner.evidence(IMAGES), learner.network.statistics("Fusion")
        if selector.name == "SharedSpace":
            statistics = [{name.removeprefix("shared "): kept[name] for name in kept} for kept in statistics]
        precomputed = selector.precompute(statistics)
        pairs = selector.score_pairs(evidence, precomputed, images, tasks).cpu()
        runs = sum(len(evidence.ran(task)) for task in range(3))
        distinct = len(set(zip(images.tolist(), tasks.tolist(), strict=True)))
        assert runs == (distinct if weight and selector.name == "Fusion" else 0)
        for row, image, task in zip(pairs, images, tasks.tolist(), strict=True):
            expected = selector.score_classes(evidence, precomputed, task)[image].cpu()
            torch.testing.assert_close(row[: len(expected)], expected, rtol=1e-3, atol=1e-3)
            assert (row[len(expected) :] == -torch.inf).all()


def test_learners_that_are_gone_leave_nothing_in_the_cache(make_learner):
    gc.collect()
    before = len(PRECOMPUTED)
    for _ in range(3):
        learner = make_learner(selectors=(FUSION,))
        for first in FIRSTS[:2]:
            learner.learn(make_task(first))
            learner.predict(IMAGES[:2])
        assert len(PRECOMPUTED) > before
        del learner
        gc.collect()
    assert len(PRECOMPUTED) <= before


WEAK = replace(FUSION, shared=cps.SharedSpace(cps.RandomReLU(2)))  # a space that knows little about the classes


def hold_out(task):
    """Return the task with 40 held-out images drawn like its test images."""
    return replace(task, val=make_task(task.classes[0], test=40).test)


@pytest.fixture(scope="module")
def choosing(fabric):
    """Return a learner of three tasks with held-out images; tests must not change it."""
    training = cps.Training(6, cps.Adam(1e-2), batch_size=16)
    torch.manual_seed(0)
    learner = cps.Learner(conv_net(), rounds=1, train=training, retrain=training, selectors=(WEAK,), fabric=fabric)
    for first in FIRSTS[:3]:
        learner.learn(hold_out(make_task(first)))
    return learner


def scores_of_classes(learner, selector, task, evidence):
    """Return the scores of the classes of the tasks up to `task`: those of the best task contain the largest."""
    precomputed = selector.precompute(learner.network.statistics("Fusion")[: task + 1])
    cascade = [{n.removeprefix("cascade "): v for n, v in k.items() if n.startswith("cascade ")} for k in precomputed]
    tasks = selector.task_weight * selector.cascade.score_images(evidence, cascade)
    scores = [selector.score_classes(evidence, precomputed, index) + tasks[:, [index]] for index in range(task + 1)]
    return torch.cat(scores, dim=1)


def test_the_weights_have_the_smallest_log_loss_on_held_out_images(choosing):
    losses = torch.zeros(len(WEIGHTS), len(WEIGHTS))
    for task, first in enumerate(FIRSTS[:3]):
        images, labels = hold_out(make_task(first)).val
        evidence = choosing.evidence(images).first(task + 1)
        classes = torch.tensor([2 * task + label - first for label in labels])
        for i, j in product(range(len(WEIGHTS)), repeat=2):
            fixed = replace(WEAK, task_weight=WEIGHTS[i], class_weight=WEIGHTS[j])
            scores = scores_of_classes(choosing, fixed, task, evidence).cpu()
            losses[i, j] += torch.nn.functional.cross_entropy(scores, classes, reduction="sum")
    best = divmod(int(losses.argmin()), len(WEIGHTS))
    statistics = choosing.network.statistics("Fusion")
    assert WEAK.weights(statistics) == (WEIGHTS[best[0]], WEIGHTS[best[1]])
    assert WEAK.weights(statistics) != DEFAULT_WEIGHTS
    kept = torch.stack([each["held out log losses"] for each in statistics]).sum(dim=0).cpu()
    torch.testing.assert_close(kept, losses.flatten(), **(ROUNDING or {"rtol": 1e-4, "atol": 1e-3}))


def test_subnetworks_that_are_wrong_about_held_out_images_get_no_weight(choosing):
    statistics = choosing.network.statistics("Fusion")
    assert WEAK.weights(statistics)[1] > 0
    for task, first in enumerate(FIRSTS[:3]):
        images, labels = hold_out(make_task(first)).val
        evidence = choosing.evidence(images)
        inverted = [type(outputs)(outputs.features, -outputs.logits) for outputs in evidence]
        wrong = type(evidence).of(inverted[: task + 1], evidence.features)
        classes = torch.tensor([label - first for label in labels], device=choosing.network.device)
        statistics[task] = {**statistics[task], **WEAK.observe_held_out(wrong, classes, statistics[: task + 1])}
    assert WEAK.weights(statistics)[1] == 0


def test_without_enough_held_out_images_the_weights_are_the_default_ones(choosing, learner):
    assert FUSION.weights(learner.network.statistics("Fusion")) == DEFAULT_WEIGHTS
    two = choosing.network.statistics("Fusion")[:2]  # 80 images
    assert WEAK.weights(two) == DEFAULT_WEIGHTS


def test_the_default_weights_are_the_best_that_are_nowhere_worse_than_the_shared_space():
    assert safest_weights() == DEFAULT_WEIGHTS


def test_given_weights_are_not_replaced(choosing):
    statistics = choosing.network.statistics("Fusion")
    assert replace(WEAK, task_weight=0.3, class_weight=3.0).weights(statistics) == (0.3, 3.0)
    with pytest.raises(ValueError, match="Fusion can only select with the weights, given or chosen, that it learned"):
        replace(WEAK, task_weight=0.3).weights(statistics)


def test_chosen_weights_survive_a_file_and_are_forgotten_with_their_task(choosing, tmp_path):
    choosing.save(tmp_path / "model.cps")
    loaded = cps.load(tmp_path / "model.cps", conv_net(), fabric=choosing.fabric)
    weights = WEAK.weights(choosing.network.statistics("Fusion"))
    assert WEAK.weights(loaded.network.statistics("Fusion")) == weights
    loaded.forget(1)
    left = loaded.network.statistics("Fusion")
    assert ["held out images" in kept for kept in left] == [True, True]
    assert WEAK.weights(left) == DEFAULT_WEIGHTS  # 80 images are left


def test_beyond_the_cascades_tasks_held_out_images_choose_the_class_weight_alone(choosing):
    statistics = choosing.network.statistics("Fusion")
    losses = torch.stack([kept["held out log losses"] for kept in statistics]).sum(dim=0).cpu()
    few = replace(WEAK, cascade_tasks=2)
    assert few.weights(statistics) == (0.0, WEIGHTS[int(losses[: len(WEIGHTS)].argmin())])


def test_without_a_cascade_the_log_losses_do_not_depend_on_the_task_weight(choosing):
    statistics, labels = choosing.network.statistics("Fusion"), torch.zeros(len(IMAGES), dtype=torch.long)
    evidence = choosing.evidence(IMAGES)
    alone = replace(WEAK, cascade_tasks=0).observe_held_out(evidence, labels.to(evidence[0].logits.device), statistics)
    rows = alone["held out log losses"].reshape(len(WEIGHTS), len(WEIGHTS))
    assert (rows == rows[0]).all()
    assert not (rows == rows[:, :1]).all()
    both = WEAK.observe_held_out(evidence, labels.to(evidence[0].logits.device), statistics)["held out log losses"]
    torch.testing.assert_close(both[: len(WEIGHTS)], rows[0])  # a task weight of zero leaves the cascade out


def test_only_the_first_tasks_keep_log_losses(choosing, monkeypatch):
    statistics, labels = choosing.network.statistics("Fusion"), torch.zeros(len(IMAGES), dtype=torch.long)
    monkeypatch.setattr("cps.selection.fusion.CHOOSING_TASKS", 2)
    assert WEAK.observe_held_out(choosing.evidence(IMAGES), labels, statistics) == {}
