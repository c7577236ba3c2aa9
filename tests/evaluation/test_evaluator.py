"""Evaluation gives what predicting after each task would give, from one pass over the test images."""

import json

import numpy as np
import pytest
import torch

import cps
from cps.evaluation.confusion import Confusion
from cps.evaluation.evaluator import shuffled_groups
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


def accuracy_of(prediction, labels):
    return 100 * np.mean([predicted == label for predicted, label in zip(prediction.classes, labels, strict=True)])


def test_accuracy_on_single_images_equals_the_accuracy_of_predict(learned):
    learner, tasks = learned
    evaluation = cps.evaluate(learner, tasks, group_sizes=[1])
    for selector in learner.config.selectors:
        last_row = evaluation.class_il[selector.name][1].accuracy[-1]
        for task, accuracy in zip(tasks, last_row, strict=True):
            prediction = learner.predict(task.test[0], selector=selector)
            assert accuracy == pytest.approx(accuracy_of(prediction, task.test[1]))


def test_earlier_rows_equal_evaluations_made_at_that_time(make_learner):
    learner = make_learner()
    tasks = [make_task(10 * index, seed=4) for index in range(3)]
    evaluations = []
    for index, task in enumerate(tasks):
        learner.learn(task)
        evaluations.append(cps.evaluate(learner, tasks[: index + 1], group_sizes=[1, 4]))
    final = evaluations[-1]
    for after, earlier in enumerate(evaluations):
        end = after + 1
        assert final.task_il.accuracy[after, :end].tolist() == earlier.task_il.accuracy[-1].tolist()
        for size in (1, 4):
            now, then = (evaluation.class_il["MaxOutput"][size] for evaluation in (final, earlier))
            assert now.accuracy[after, :end].tolist() == then.accuracy[-1].tolist()
            assert now.selection[after, :end].tolist() == then.selection[-1].tolist()


def test_task_il_equals_prediction_with_the_task_given(learned):
    learner, tasks = learned
    task_il = cps.evaluate(learner, tasks, group_sizes=[1]).task_il
    for index, task in enumerate(tasks):
        prediction = learner.predict(task.test[0], task=index)
        assert task_il.accuracy[-1, index] == pytest.approx(accuracy_of(prediction, task.test[1]))


def test_the_oracle_predicts_as_if_the_task_were_given(learned):
    learner, tasks = learned
    images = tasks[2].test[0]
    given = learner.predict(images, task=2)
    assert learner.predict(images, selector=cps.Oracle(2)).classes == given.classes


def test_each_image_passes_each_subnetwork_once(learned, monkeypatch):
    learner, tasks = learned
    calls = []
    outputs = SharedNetwork.outputs
    monkeypatch.setattr(
        SharedNetwork,
        "outputs",
        lambda self, batches, tasks, features: calls.append([*tasks]) or outputs(self, batches, tasks, features),
    )
    cps.evaluate(learner, tasks, group_sizes=[1, 2, 5, 10, 20, 50])
    assert calls == [[0, 1, 2]] * 3


def test_groups_are_drawn_at_random_and_the_last_may_be_smaller():
    task = torch.tensor([0] * 13 + [1] * 7)
    groups = shuffled_groups(task, 5, seed=0)
    assert sorted(torch.bincount(groups[:13]).tolist()) == [3, 5, 5]
    assert set(groups[:13].tolist()).isdisjoint(groups[13:].tolist())
    assert not torch.equal(groups[:13], consecutive_groups(13, 5))
    assert torch.equal(groups, shuffled_groups(task, 5, seed=0))


def test_all_images_of_a_group_get_one_task_and_count_as_wrong_if_it_is_mistaken(learned):
    learner, tasks = learned
    prediction = learner.predict(tasks[0].test[0], group_size=5)
    for start in (0, 5, 10):
        assert len(set(prediction.tasks[start : start + 5].tolist())) == 1
    selection = cps.evaluate(learner, tasks, group_sizes=[13]).class_il["MaxOutput"][13].selection
    assert all(value in (0, 100) for value in selection[~np.isnan(selection)])


def test_larger_groups_help_on_separable_tasks(learned):
    learner, tasks = learned
    by_size = cps.evaluate(learner, tasks, group_sizes=[1, 13]).class_il["ImportanceSignature"]
    assert by_size[13].ACC >= by_size[1].ACC


def test_confidence_is_a_share(learned):
    learner, tasks = learned
    prediction = learner.predict(tasks[1].test[0])
    assert ((prediction.confidence >= 0.5) & (prediction.confidence <= 1)).all()  # two classes per task


def test_the_order_of_the_classes_of_a_test_task_does_not_matter(learned):
    learner, tasks = learned
    reordered = [cps.Task(list(reversed(task.classes)), train=task.train, test=task.test) for task in tasks]
    assert cps.evaluate(learner, reordered, group_sizes=[1]) == cps.evaluate(learner, tasks, group_sizes=[1])


def test_labels_that_are_positions_follow_the_class_order_of_the_test_task(make_learner):
    learner, (images, labels) = make_learner(), make_task().train
    learner.learn(cps.Task(["cat", "dog"], train=(images, labels)))
    reordered = [cps.Task(["dog", "cat"], train=None, test=(images, [1 - label for label in labels]))]
    same = [cps.Task(["cat", "dog"], train=None, test=(images, labels))]
    assert cps.evaluate(learner, reordered, group_sizes=[1]) == cps.evaluate(learner, same, group_sizes=[1])


def test_tasks_other_than_the_learned_ones_are_rejected(learned):
    learner, tasks = learned
    with pytest.raises(ValueError, match=r"task 0 was learned with the classes \(0, 1\), .* has \(20, 21\)"):
        cps.evaluate(learner, list(reversed(tasks)))
    learner.forget(0)
    with pytest.raises(ValueError, match=r"task 0 was learned with the classes \(10, 11\), .* has \(0, 1\)"):
        cps.evaluate(learner, tasks)
    with pytest.raises(ValueError, match="at least one selector"):
        cps.evaluate(learner, tasks[1:], selectors=[])


def test_one_task_instead_of_a_list_is_rejected_with_a_hint(learned):
    learner, tasks = learned
    with pytest.raises(TypeError, match=r"got one cps.Task; pass \[task\]"):
        cps.evaluate(learner, tasks[0])


def test_selectors_of_the_same_name_and_missing_tasks_are_rejected(make_learner):
    learner, task = make_learner(), make_task(0)
    learner.learn(task)
    with pytest.raises(ValueError, match="no two of the same name"):
        cps.evaluate(learner, [task], selectors=[cps.Cascade(logit_weight=0.0), cps.Cascade(logit_weight=9.0)])
    with pytest.raises(ValueError, match="task 0 has no test images"):
        cps.evaluate(learner, [cps.Task(task.classes, task.train)])
    with pytest.raises(ValueError, match="no task to evaluate"):
        cps.evaluate(learner, [])


def test_flips_average_the_outputs_over_each_image_and_its_mirror_image(learned):
    learner, tasks = learned
    flipped = cps.evaluate(learner, tasks, group_sizes=[1], flips=True)
    images, labels = tasks[2].test
    images = images.to(learner.network.device)
    logits = [(learner.evidence(images)[t].logits + learner.evidence(images.flip(-1))[t].logits) / 2 for t in range(3)]
    selected = torch.stack([each.amax(dim=1) for each in logits], dim=1).argmax(dim=1) == 2
    correct = logits[2].argmax(dim=1).cpu() == torch.tensor([tasks[2].classes.index(int(label)) for label in labels])
    metrics = flipped.class_il["MaxOutput"][1]
    assert metrics.selection[2, 2] == pytest.approx(100 * float(selected.float().mean()))
    assert flipped.task_il.accuracy[2, 2] == pytest.approx(100 * float(correct.float().mean()))
    assert metrics.accuracy[2, 2] == pytest.approx(100 * float((correct & selected.cpu()).float().mean()))


def test_top5_is_measured_if_every_task_has_more_than_five_classes(make_learner, learned):
    assert cps.evaluate(*learned, group_sizes=[1]).task_il.top5 is None
    learner = make_learner()
    tasks = [make_task(10 * index, classes=7, images=42, test=28) for index in range(2)]
    for task in tasks:
        learner.learn(task)
    evaluation = cps.evaluate(learner, tasks, group_sizes=[28])
    top5 = []
    for index, task in enumerate(tasks):
        best = learner.evidence(task.test[0])[index].logits.topk(5, dim=1).indices.cpu()
        truth = learner.network.subnetworks[index].local(task.test[1])
        top5.append(100 * float((best == truth[:, None]).any(dim=1).float().mean()))
    assert evaluation.task_il.top5 == pytest.approx(np.mean(top5))
    metrics = evaluation.class_il["MaxOutput"][28]
    assert metrics.top5 >= metrics.ACC
    wrong = cps.evaluate(learner, tasks, group_sizes=[1], selectors={"the first task": cps.Oracle(0)})
    assert wrong.class_il["the first task"][1].top5 == pytest.approx(top5[0] / 2)


def test_single_images_are_counted_by_their_class_and_the_predicted_one(learned):
    learner, tasks = learned
    confusion = cps.evaluate(learner, tasks, group_sizes=[2]).confusion
    true = [name for task in tasks for name in task.test[1]]
    predicted = [name for task in tasks for name in learner.predict(task.test[0]).classes]
    assert confusion == Confusion.of([name for classes in learner.classes for name in classes], true, predicted)
    assert sum(each.images for each in confusion.classes) == len(true)


def test_an_evaluation_as_json_data_has_strings_as_group_sizes(learned):
    data = json.loads(json.dumps(cps.evaluate(*learned, group_sizes=[1, 5]).encode(), allow_nan=False))
    assert list(data) == ["task_il", "class_il", "confusion"]
    assert list(data["task_il"]) == ["ACC", "BWT", "AIA", "accuracy"]
    assert list(data["class_il"]["MaxOutput"]) == ["1", "5"]
    assert list(data["class_il"]["MaxOutput"]["1"]) == ["ACC", "BWT", "AIA", "accuracy", "selection"]
