"""The metrics equal a 3x3 example worked by hand."""

import numpy as np
import pytest
import torch

import cps
from cps.evaluation.metrics import (
    auroc,
    average_accuracy,
    average_incremental_accuracy,
    backward_transfer,
    false_positive_rate,
    history,
)

NAN = np.nan
ACCURACY = np.array([[90.0, NAN, NAN], [80.0, 70.0, NAN], [60.0, 50.0, 40.0]])


def test_metrics_equal_the_example_worked_by_hand():
    assert average_accuracy(ACCURACY) == pytest.approx((60 + 50 + 40) / 3)
    assert backward_transfer(ACCURACY) == pytest.approx(((90 - 60) + (70 - 50)) / 2)
    assert average_incremental_accuracy(ACCURACY) == pytest.approx((90 + 75 + 50) / 3)
    assert history(ACCURACY) == pytest.approx([90, 75, 50])


def test_a_history_weighed_by_classes_is_the_accuracy_over_all_images():
    assert history(ACCURACY, [2, 1, 1]) == pytest.approx([90, (2 * 80 + 70) / 3, (2 * 60 + 50 + 40) / 4])


def test_bwt_is_negative_if_accuracy_rose():
    assert backward_transfer(np.array([[50.0, NAN], [70.0, 60.0]])) == -20


@pytest.mark.parametrize(
    "rows", [ACCURACY.tolist(), [[90], [80, 70], [60, 50, 40]], tuple(map(torch.tensor, ACCURACY))]
)
def test_a_matrix_may_be_given_as_lists_which_may_end_at_the_diagonal(rows):
    for metric in (average_accuracy, backward_transfer, average_incremental_accuracy, history):
        assert metric(rows) == metric(ACCURACY)
    assert cps.metrics.Metrics.of(rows) == cps.metrics.Metrics.of(ACCURACY)


@pytest.mark.parametrize("rows", [[], [[90], [80]], [90, 80]], ids=str)
def test_a_matrix_without_a_column_for_each_row_raises(rows):
    with pytest.raises(ValueError, match="with a column for each task in the row after it"):
        average_accuracy(rows)


def test_joint_training_has_one_row_for_all_tasks():
    assert average_accuracy([[90, 80, 70]]) == 80
    assert backward_transfer([[90, 80, 70]]) == 0


def test_bwt_of_a_single_task_is_zero():
    assert backward_transfer(np.array([[50.0]])) == 0


def test_negative_control_a_transposed_matrix_gives_other_metrics():
    whole = np.array([[90.0, 10.0, 10.0], [80.0, 70.0, 10.0], [60.0, 50.0, 40.0]])
    assert average_accuracy(whole) == pytest.approx(50)
    assert average_accuracy(whole.T) == pytest.approx(20)
    assert average_incremental_accuracy(whole) == pytest.approx((90 + 75 + 50) / 3)
    assert average_incremental_accuracy(whole.T) == pytest.approx((90 + 40 + 20) / 3)


def test_auroc_counts_pairs_and_halves_ties():
    assert auroc([3, 2, 2], [1, 2]) == pytest.approx((2 + 1.5 + 1.5) / 6)
    assert auroc([1, 2], [3, 4]) == 0
    draws = np.random.default_rng(0)
    known, unknown = draws.normal(1, 1, 400), draws.normal(0, 1, 300)
    assert auroc(known, unknown) == pytest.approx(np.mean(known[:, None] > unknown[None]))


def test_the_false_positive_rate_counts_unknown_images_above_the_threshold():
    known, unknown = np.arange(1, 101), np.array([1, 5, 6, 7, 100])
    assert false_positive_rate(known, unknown, 0.95) == 3 / 5  # the threshold is 6: 95 known images reach it
    assert false_positive_rate(torch.tensor(known), torch.tensor(unknown), 1.0) == 1
    assert false_positive_rate(known, [0.5], 1.0) == 0
