"""A closed form measured task by task: its matrices agree with its predictions."""

import numpy as np
import pytest
import torch
from studies import closed_forms

import cps
from cps.evaluation import evaluator
from cps.experiments.recipes import RECIPES
from cps.methods.closed_form import ClosedForm
from cps.methods.closed_form_metrics import ClosedFormMetrics, as_metrics, measure_closed_form, row_of_scores
from cps.storage.json_codec import from_json, to_json
from samples import make_task

SPACE = cps.RandomReLU(4)  # so few features that some images are wrong


@pytest.fixture(scope="module")
def tasks():
    return [make_task(0, test=30), make_task(10, classes=3, test=30), make_task(20, test=30)]


@pytest.fixture(scope="module")
def measured(tasks):
    return measure_closed_form(ClosedForm(SPACE, pooled=True), tasks, group_sizes=(1, 5))


def test_every_row_is_the_accuracy_of_what_was_learned_until_then(tasks, measured):
    method = ClosedForm(SPACE)
    for after, task in enumerate(tasks):
        method.learn(task)
        for on, tested in enumerate(tasks[: after + 1]):
            for metrics, known in ((measured.class_il[1], None), (measured.task_il, on)):
                found = method.predict(tested.test[0], task=known)
                share = np.mean([name == label for name, label in zip(found, tested.test[1], strict=True)])
                assert metrics.accuracy[after, on] == pytest.approx(100 * share)
    assert measured.class_il[1].ACC < measured.task_il.ACC < 100  # the negative control: not everything is right
    assert np.isnan(measured.class_il[1].accuracy[0, 1])


def test_groups_find_the_task_more_often_and_are_those_of_evaluate(tasks, measured, monkeypatch):
    selection = {size: metrics.selection[-1].mean() for size, metrics in measured.class_il.items()}
    assert selection[1] < selection[5]
    drawn, draw = [], evaluator.shuffled_groups
    monkeypatch.setattr(evaluator, "shuffled_groups", lambda *args: drawn.append(draw(*args)) or drawn[-1])
    measure_closed_form(ClosedForm(SPACE), tasks, group_sizes=(5,), seed=3)
    expected = draw(torch.arange(3).repeat_interleave(30), 5, 3)
    assert torch.equal(drawn[-1], expected)
    assert torch.equal(drawn[0], expected[:30])


def test_a_group_with_the_wrong_task_counts_as_wrong():
    # Two tasks of one class: the second image of task 1 is mistaken on its own, and correct in its group.
    scores = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 5.0], [1.0, 0.0]])
    row = row_of_scores(scores, [torch.tensor([0, 0]), torch.tensor([0, 0])], [1, 1], (1, 2))
    assert row.found == {"MaxOutput": {1: (100.0, 50.0), 2: (100.0, 100.0)}}
    assert row.selection == row.found
    assert row.known == (100.0, 100.0)
    row = row_of_scores(-scores, [torch.tensor([0, 0]), torch.tensor([0, 0])], [1, 1], (2,))
    assert row.found["MaxOutput"] == {2: (0.0, 0.0)}


def test_metrics_are_the_same_after_writing_and_reading(measured):
    again = from_json(ClosedFormMetrics, to_json(measured))
    assert again == measured
    assert again.label == "closed form (LDA, RandomReLU)"
    assert again.kept["covariances"] == 10 * 8
    assert again.seconds > 0


def test_the_default_space_is_named_and_progress_is_reported(tasks):
    done = []
    measured = measure_closed_form(ClosedForm(), tasks[:2], group_sizes=(1,), on_task=done.append)
    assert measured.space == "RandomReLU(size=1000)"
    assert done == [1, 2]
    assert measured.class_il[1].ACC > 90


def test_the_study_of_sums_by_class_gives_the_matrices_of_the_method(tmp_path):
    (study,) = closed_forms.STUDIES["digits"]
    features = closed_forms.read_features(study, None, None, tmp_path)
    scenario = RECIPES["digits"]().scenario(None, 3)
    rows = closed_forms._rows(features, cps.LDA(0.3), 3, study.cuts)["digits"]
    task_il, class_il = as_metrics(rows)
    measured = measure_closed_form(ClosedForm(study.space, cps.LDA(0.3)), list(scenario), group_sizes=(1, 2, 5))
    np.testing.assert_allclose(task_il.accuracy, measured.task_il.accuracy)
    for size, metrics in measured.class_il.items():
        np.testing.assert_allclose(class_il[size].accuracy, metrics.accuracy)
        np.testing.assert_allclose(class_il[size].selection, metrics.selection)
    other = closed_forms._rows(features, cps.NearestMean(), 3, study.cuts)["digits"]
    assert as_metrics(other)[1][1].ACC < class_il[1].ACC - 1  # the negative control


def test_top5_counts_images_whose_class_is_among_the_five_best_of_the_task():
    draws = torch.Generator().manual_seed(0)
    scores, truth = torch.randn(40, 14, generator=draws), [torch.arange(20) % 6, torch.arange(20) % 8]
    row = row_of_scores(scores, truth, [6, 8], (1,))
    first = [int(label) in scores[i, :6].argsort(descending=True)[:5] for i, label in enumerate(truth[0])]
    second = [int(label) in scores[20 + i, 6:].argsort(descending=True)[:5] for i, label in enumerate(truth[1])]
    assert row.known_top5 == pytest.approx([5.0 * sum(first), 5.0 * sum(second)])
    is_selected = scores[:, :6].amax(dim=1) >= scores[:, 6:].amax(dim=1)
    found = [a and b for a, b in zip(first, is_selected[:20].tolist(), strict=True)]
    assert row.found_top5["MaxOutput"][1][0] == pytest.approx(5.0 * sum(found))
    before = row_of_scores(scores[:20, :6], truth[:1], [6], (1,))
    task_il, class_il = as_metrics([before, row])
    assert task_il.top5 == pytest.approx(2.5 * (sum(first) + sum(second)))
    assert 0 < class_il[1].top5 < task_il.top5


def test_tasks_of_at_most_five_classes_have_no_top5(measured):
    assert measured.task_il.top5 is None
    assert measured.class_il[1].top5 is None
