"""The types that `evaluate` returns."""

import numpy as np
import pytest

import cps

NAN = np.nan
ACCURACY = np.array([[90.0, NAN, NAN], [80.0, 70.0, NAN], [60.0, 50.0, 40.0]])


def test_metrics_are_computed_from_the_accuracy_matrix():
    metrics = cps.Metrics.of(ACCURACY)
    assert metrics.ACC == pytest.approx(50)
    assert metrics.BWT == pytest.approx(25)
    assert metrics.AIA == pytest.approx((90 + 75 + 50) / 3)
    assert metrics.top5 is metrics.selection is None


def test_metrics_as_json_data_have_null_instead_of_nan():
    data = cps.Evaluation(cps.Metrics.of(ACCURACY), {}).encode()
    assert data["task_il"]["accuracy"] == [[90.0, None, None], [80.0, 70.0, None], [60.0, 50.0, 40.0]]


def test_metrics_are_equal_if_all_their_values_are():
    changed = ACCURACY.copy()
    changed[1, 0] += 1
    assert cps.Metrics.of(ACCURACY) == cps.Metrics.of(ACCURACY.copy())
    assert cps.Metrics.of(ACCURACY) != cps.Metrics.of(changed)
    assert cps.Metrics.of(ACCURACY) != cps.Metrics.of(ACCURACY, selection=ACCURACY)
