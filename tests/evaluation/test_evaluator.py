"""Evaluation is what predicting task by task would give, from one pass over the images."""

import numpy as np
import pytest
import torch

import cps
from cps.evaluation.evaluator import _shuffled_groups
from cps.network.shared import SharedNetwork
from cps.selection.groups import consecutive_groups
from samples import make_task


@pytest.fixture
def learned(make_learner):
    learner = make_learner()
    tasks = [make_task(10 * index, test=13, seed=3) for index in range(3)]
    for task in tasks:
        learner.learn(task)
    return learner, tasks


def test_accuracy_of_single_images_equals_prediction(learned):
    learner, tasks = learned
    results = cps.evaluate(learner, tasks, group_sizes=[1])
    for selector in learner.selectors:
        last = results["class_il"][selector.name]["1"]["accuracy"][-1]
        for task, accuracy in zip(tasks, last, strict=True):
            predicted = learner.predict(task.test[0], selector=selector).classes
            assert accuracy == pytest.approx(
                100 * np.mean([p == t for p, t in zip(predicted, task.test[1], strict=True)])
            )


def test_earlier_rows_are_what_the_learner_said_then(make_learner):
    learner = make_learner()
    tasks = [make_task(10 * index, seed=4) for index in range(3)]
    rows = []
    for index, task in enumerate(tasks):
        learner.learn(task)
        rows.append(cps.evaluate(learner, tasks[: index + 1], group_sizes=[1, 4]))
    final = rows[-1]["class_il"]["MaxOutput"]
    for after in range(3):
        assert rows[-1]["task_il"]["accuracy"][after][: after + 1] == rows[after]["task_il"]["accuracy"][-1]
        for size in ("1", "4"):
            then = rows[after]["class_il"]["MaxOutput"][size]
            assert final[size]["accuracy"][after][: after + 1] == then["accuracy"][-1]
            assert final[size]["selection"][after][: after + 1] == then["selection"][-1]


def test_task_il_is_prediction_with_the_task_given(learned):
    learner, tasks = learned
    task_il = cps.evaluate(learner, tasks, group_sizes=[1])["task_il"]
    for index, task in enumerate(tasks):
        predicted = learner.predict(task.test[0], task=index).classes
        right = np.mean([p == t for p, t in zip(predicted, task.test[1], strict=True)])
        assert task_il["accuracy"][-1][index] == pytest.approx(100 * right)


def test_the_oracle_selects_what_task_il_is(learned):
    learner, tasks = learned
    images = tasks[2].test[0]
    warned = learner.predict(images, task=2)
    assert learner.predict(images, selector=cps.Oracle(2)).classes == warned.classes


def test_each_image_passes_each_subnetwork_once(learned, monkeypatch):
    learner, tasks = learned
    calls = []
    outputs = SharedNetwork.outputs
    monkeypatch.setattr(
        SharedNetwork, "outputs", lambda self, batches, tasks: calls.append([*tasks]) or outputs(self, batches, tasks)
    )
    cps.evaluate(learner, tasks, group_sizes=[1, 2, 5, 10, 20, 50])
    assert calls == [[0, 1, 2]] * 3


def test_groups_are_drawn_at_random_and_the_last_may_be_smaller():
    task = torch.tensor([0] * 13 + [1] * 7)
    groups = _shuffled_groups(task, 5, seed=0)
    assert sorted(torch.bincount(groups[:13]).tolist()) == [3, 5, 5]
    assert set(groups[:13].tolist()).isdisjoint(groups[13:].tolist())
    assert not torch.equal(groups[:13], consecutive_groups(13, 5))
    assert torch.equal(groups, _shuffled_groups(task, 5, seed=0))


def test_a_group_shares_its_task_and_a_mistaken_one_is_wrong_whole(learned):
    learner, tasks = learned
    prediction = learner.predict(tasks[0].test[0], group_size=5)
    for start in (0, 5, 10):
        assert len(set(prediction.tasks[start : start + 5].tolist())) == 1
    entry = cps.evaluate(learner, tasks, group_sizes=[13])["class_il"]["MaxOutput"]["13"]
    assert all(value in (0, 100) for row in entry["selection"] for value in row if value is not None)


def test_more_images_in_a_group_help_on_separable_tasks(learned):
    learner, tasks = learned
    by_size = cps.evaluate(learner, tasks, group_sizes=[1, 13])["class_il"]["ImportanceSignature"]
    assert by_size["13"]["ACC"] >= by_size["1"]["ACC"]


def test_confidence_is_a_share(learned):
    learner, tasks = learned
    prediction = learner.predict(tasks[1].test[0])
    assert ((prediction.confidence >= 0.5) & (prediction.confidence <= 1)).all()  # two classes a task


def test_the_order_in_which_classes_are_named_at_test_does_not_matter(learned):
    learner, tasks = learned
    turned = [cps.Task(list(reversed(task.classes)), train=task.train, test=task.test) for task in tasks]
    assert cps.evaluate(learner, turned, group_sizes=[1]) == cps.evaluate(learner, tasks, group_sizes=[1])


def test_labels_that_are_positions_count_in_the_order_of_the_task_that_is_evaluated(make_learner):
    learner, (images, labels) = make_learner(), make_task().train
    learner.learn(cps.Task(["cat", "dog"], train=(images, labels)))
    turned = [cps.Task(["dog", "cat"], train=None, test=(images, [1 - label for label in labels]))]
    right = [cps.Task(["cat", "dog"], train=None, test=(images, labels))]
    assert cps.evaluate(learner, turned, group_sizes=[1]) == cps.evaluate(learner, right, group_sizes=[1])


def test_tasks_that_are_not_those_that_were_learned_are_refused(learned):
    learner, tasks = learned
    with pytest.raises(ValueError, match=r"task 0 was learned with the classes \(0, 1\), .* has \(20, 21\)"):
        cps.evaluate(learner, list(reversed(tasks)))
    learner.forget(0)
    with pytest.raises(ValueError, match=r"task 0 was learned with the classes \(10, 11\), .* has \(0, 1\)"):
        cps.evaluate(learner, tasks)
    with pytest.raises(ValueError, match="at least one selector"):
        cps.evaluate(learner, tasks[1:], selectors=[])


def test_flips_average_the_outputs_for_each_image_and_its_mirror_image(learned):
    learner, tasks = learned
    flipped = cps.evaluate(learner, tasks, group_sizes=[1], flips=True)
    images, labels = tasks[2].test
    images = images.to(learner.network.device)
    logits = [(learner.evidence(images)[t].logits + learner.evidence(images.flip(-1))[t].logits) / 2 for t in range(3)]
    selected = torch.stack([each.amax(dim=1) for each in logits], dim=1).argmax(dim=1) == 2
    right = logits[2].argmax(dim=1).cpu() == torch.tensor([tasks[2].classes.index(int(label)) for label in labels])
    entry = flipped["class_il"]["MaxOutput"]["1"]
    assert entry["selection"][2][2] == pytest.approx(100 * float(selected.float().mean()))
    assert flipped["task_il"]["accuracy"][2][2] == pytest.approx(100 * float(right.float().mean()))
    assert entry["accuracy"][2][2] == pytest.approx(100 * float((right & selected.cpu()).float().mean()))


def test_top5_is_reported_for_tasks_of_more_than_five_classes(make_learner, learned):
    assert "top5" not in cps.evaluate(*learned, group_sizes=[1])["task_il"]
    learner = make_learner()
    tasks = [make_task(10 * index, classes=7, images=42, test=28) for index in range(2)]
    for task in tasks:
        learner.learn(task)
    results = cps.evaluate(learner, tasks, group_sizes=[28])
    five = []
    for index, task in enumerate(tasks):
        best = learner.evidence(task.test[0])[index].logits.topk(5, dim=1).indices.cpu()
        truth = learner.network.subnetworks[index].local(task.test[1])
        five.append(100 * float((best == truth[:, None]).any(dim=1).float().mean()))
    assert results["task_il"]["top5"] == pytest.approx(np.mean(five))
    entry = results["class_il"]["MaxOutput"]["28"]
    assert entry["top5"] >= entry["ACC"]
    wrong = cps.evaluate(learner, tasks, group_sizes=[1], selectors={"the first task": cps.Oracle(0)})
    assert wrong["class_il"]["the first task"]["1"]["top5"] == pytest.approx(five[0] / 2)
