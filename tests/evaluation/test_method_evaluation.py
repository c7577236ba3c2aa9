"""The evaluation of any method, against a hand-made one whose answers are known."""

import itertools

import numpy as np
import pytest
import torch

import cps
from cps.evaluation.method_evaluation import accuracy_row, evaluate_rows, evaluation_of, outputs_of_scores
from cps.evaluation.metrics import history
from cps.network.outputs import Evidence, Outputs
from cps.selection.softmax_mass import SoftmaxMass


class ScoresAsImages:
    """A method whose score of a class is the pixel with its number; `is_sealed` can be set."""

    is_sealed = False

    def __init__(self, *sizes):
        first = np.cumsum([0, *sizes]).tolist()
        self.classes = [tuple(range(a, b)) for a, b in itertools.pairwise(first)]

    def statistics(self, selector):
        return [{} for _ in self.classes]

    def evidence(self, images):
        scores = images[:, : sum(map(len, self.classes))]
        return Evidence.of([Outputs(scores, part) for part in scores.split([*map(len, self.classes)], dim=1)])


def tasks_of(method, images, labels):
    """Return tasks with these test images."""
    tasks = []
    for classes in method.classes:
        own = [index for index, label in enumerate(labels) if label in classes]
        tasks.append(cps.Task(classes, train=None, test=(images[own], [labels[index] for index in own])))
    return tasks


def random_scores(sizes, images=60):
    draws = torch.Generator().manual_seed(0)
    labels = [index % sum(sizes) for index in range(images)]
    scores = torch.randn(images, sum(sizes), generator=draws)
    scores[range(images), labels] += 1.0
    return scores, labels


def share(is_right, labels, classes):
    return 100 * np.mean([right for right, label in zip(is_right, labels, strict=True) if label in classes])


@pytest.mark.parametrize("sizes", [(2, 3, 1), (4, 4)])
def test_a_single_image_gets_the_class_with_the_largest_score_of_all(sizes):
    method, (scores, labels) = ScoresAsImages(*sizes), random_scores(sizes)
    (row,) = evaluate_rows(method, tasks_of(method, scores, labels), selectors=[cps.MaxOutput()], group_sizes=[1])
    is_right = [best == label for best, label in zip(scores.argmax(dim=1).tolist(), labels, strict=True)]
    assert row.found["MaxOutput"][1] == pytest.approx([share(is_right, labels, each) for each in method.classes])
    assert 20 < np.mean(row.found["MaxOutput"][1]) < 80


def test_with_the_task_known_only_its_classes_compete():
    method, (scores, labels) = ScoresAsImages(2, 3), random_scores((2, 3))
    (row,) = evaluate_rows(method, tasks_of(method, scores, labels), selectors=[cps.MaxOutput()], group_sizes=[1])
    inside = [
        classes[int(image[list(classes)].argmax())] == label
        for image, label in zip(scores, labels, strict=True)
        for classes in method.classes
        if label in classes
    ]
    assert row.known == pytest.approx([share(inside, labels, each) for each in method.classes])
    assert min(row.known) > max(row.found["MaxOutput"][1])


def test_a_method_that_is_sealed_has_the_rows_after_each_task():
    """Those that it had when only the first tasks were learned, since scores of earlier tasks never change."""
    sizes = (2, 3, 2)
    method, (scores, labels) = ScoresAsImages(*sizes), random_scores(sizes)
    method.is_sealed = True
    tasks, selectors = tasks_of(method, scores, labels), [cps.MaxOutput(), SoftmaxMass()]
    rows = evaluate_rows(method, tasks, selectors=selectors, group_sizes=[1, 4], seed=3)
    assert len(rows) == 3
    for after, row in enumerate(rows):
        earlier = ScoresAsImages(*sizes[: after + 1])
        assert [row] == evaluate_rows(earlier, tasks, selectors=selectors, group_sizes=[1, 4], seed=3)


def test_a_group_gets_one_task_and_all_of_it_is_wrong_if_that_is_mistaken():
    scores = torch.tensor([[3.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 2.0], [0.0, 9.0, 0.0, 1.0]])
    method = ScoresAsImages(2, 2)
    tasks = tasks_of(method, scores, [0, 1, 3, 3])
    (row,) = evaluate_rows(method, tasks, selectors=[cps.MaxOutput()], group_sizes=[1, 2])
    assert row.found["MaxOutput"] == {
        1: (50.0, 50.0),
        2: (50.0, 0.0),
    }  # the second image loses its task alone, not its class
    assert row.selection["MaxOutput"] == {1: (50.0, 50.0), 2: (100.0, 0.0)}
    assert row.known == (50.0, 100.0)


def test_aia_over_tasks_and_over_images_differ_on_fifty_and_ten_classes():
    """80% after the first task, then 60% and 90%: 75% over the two tasks, and 65% over the images of 60 classes."""
    shares = {0: (0.8,), 1: (0.6, 0.9)}
    rows = []
    for after, right in shares.items():
        sizes = [50, 10][: after + 1]
        method = ScoresAsImages(*sizes)
        labels = [label for label in range(sum(sizes)) for _ in range(10)]
        images = torch.zeros(len(labels), sum(sizes))
        for task, classes in enumerate(method.classes):
            own = [index for index, label in enumerate(labels) if label in classes]
            for place, index in enumerate(own):
                is_right = place < right[task] * len(own)
                images[index, labels[index] if is_right else (labels[index] + 1) % 2] = 1.0
        tasks = tasks_of(method, images, labels)
        rows += evaluate_rows(method, tasks, selectors=[cps.MaxOutput()], group_sizes=[1])
    metrics = evaluation_of(rows).class_il["MaxOutput"][1]
    assert metrics.accuracy[-1].tolist() == [60.0, 90.0]
    assert metrics.AIA == pytest.approx((80 + 75) / 2)
    assert np.mean(history(metrics.accuracy, [50, 10])) == pytest.approx((80 + 65) / 2)
    assert metrics.BWT == pytest.approx(20)


def test_joint_training_has_one_row():
    method, (scores, labels) = ScoresAsImages(2, 2), random_scores((2, 2))
    rows = evaluate_rows(method, tasks_of(method, scores, labels), selectors=[cps.MaxOutput()], group_sizes=[1])
    metrics = evaluation_of(rows).task_il
    assert metrics.accuracy.shape == (1, 2)
    assert metrics.ACC == pytest.approx(np.mean(rows[0].known))


def test_top5_is_that_of_the_selected_task_after_all_tasks():
    method, (scores, labels) = ScoresAsImages(6, 7), random_scores((6, 7), images=130)
    method.is_sealed = True
    rows = evaluate_rows(method, tasks_of(method, scores, labels), selectors=[cps.MaxOutput()], group_sizes=[1])
    assert rows[0].found_top5 is rows[0].known_top5 is None
    evaluation = evaluation_of(rows)
    best = [
        [classes[index] for index in image[list(classes)].topk(5).indices.tolist()]
        for image in scores
        for classes in [next(each for each in method.classes if int(image.argmax()) in each)]
    ]
    expected = [label in five for five, label in zip(best, labels, strict=True)]
    found = np.mean([share(expected, labels, classes) for classes in method.classes])
    assert evaluation.class_il["MaxOutput"][1].top5 == pytest.approx(found)
    assert evaluation.task_il.top5 > found > evaluation.class_il["MaxOutput"][1].ACC


def test_a_task_without_test_images_is_refused():
    with pytest.raises(ValueError, match="task 0 has no test images"):
        evaluate_rows(ScoresAsImages(2), [cps.Task([0, 1], train=None)], selectors=[cps.MaxOutput()], group_sizes=[1])


def test_scores_of_all_images_are_the_outputs_of_a_method():
    scores, labels = random_scores((2, 3), images=10)
    order = sorted(range(10), key=lambda index: labels[index] >= 2)
    truth = [
        torch.tensor([labels[i] for i in order if labels[i] < 2]),
        torch.tensor([labels[i] - 2 for i in order if labels[i] >= 2]),
    ]
    test, method = outputs_of_scores(scores[order], truth, [2, 3]), ScoresAsImages(2, 3)
    selectors, ordered = [cps.MaxOutput()], [labels[index] for index in order]
    row = accuracy_row(test, method.statistics, selectors, [1, 3], 0, 1)
    assert [row] == evaluate_rows(
        method, tasks_of(method, scores[order], ordered), selectors=selectors, group_sizes=[1, 3]
    )
