"""Invariant 4: the metrics equal a 3x3 example worked by hand."""

import numpy as np
import pytest

from cps.metrics import average_accuracy, average_incremental_accuracy, backward_transfer, history, summary

NAN = np.nan
ACCURACY = np.array([[90.0, NAN, NAN], [80.0, 70.0, NAN], [60.0, 50.0, 40.0]])


def test_metrics_equal_the_example_worked_by_hand():
    assert average_accuracy(ACCURACY) == pytest.approx((60 + 50 + 40) / 3)
    assert backward_transfer(ACCURACY) == pytest.approx(((90 - 60) + (70 - 50)) / 2)
    assert average_incremental_accuracy(ACCURACY) == pytest.approx((90 + 75 + 50) / 3)
    assert history(ACCURACY) == pytest.approx([90, 75, 50])


def test_the_sign_of_forgetting_is_the_papers():
    assert backward_transfer(np.array([[50.0, NAN], [70.0, 60.0]])) == -20


def test_a_single_task_has_forgotten_nothing():
    assert backward_transfer(np.array([[50.0]])) == 0


def test_negative_control_a_transposed_matrix_gives_other_numbers():
    assert not average_accuracy(ACCURACY.T) == pytest.approx(50)


def test_the_summary_is_plain_data_without_nan():
    assert summary(ACCURACY)["accuracy"] == [[90.0, None, None], [80.0, 70.0, None], [60.0, 50.0, 40.0]]
