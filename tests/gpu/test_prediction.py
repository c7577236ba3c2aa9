"""Predictions do not depend on captured graphs; ask more with CPS_TEST_ACCELERATOR=cuda."""

import pytest
import torch

import cps
from samples import make_task, use_all_compact


def test_predictions_in_inference_mode_do_not_break_later_ones(make_learner):
    learner = make_learner()
    learner.learn(make_task(0))
    use_all_compact(learner)
    images = make_task(0).test[0]
    with torch.inference_mode():
        before = [learner.predict(images).classes for _ in range(6)]
    assert [learner.predict(images).classes for _ in range(6)] == before
    learner.network.release_images()


def test_repeated_predictions_are_bit_identical(make_learner):
    learner = make_learner()
    for first in (0, 10):
        learner.learn(make_task(first))
    images = make_task(0).test[0]
    scores = [learner.predict(images).task_scores for _ in range(6)]  # from the fourth on a GPU replays a graph
    assert all(torch.equal(each, scores[0]) for each in scores)
    assert not torch.equal(learner.predict(images.flip(0)).task_scores, scores[0])


@pytest.mark.parametrize("bound", [None, 0])
def test_small_tasks_predict_with_compact_networks_even_if_they_are_as_large_as_the_backbone(
    make_learner, monkeypatch, bound
):
    if bound is not None:  # the negative control
        monkeypatch.setattr("cps.network.compact.cache.LAUNCH_BOUND", bound)
        monkeypatch.setattr("cps.network.compact.cache.OVERHEAD_BOUND", bound)
    learner = make_learner(pruner=cps.Magnitude(0.9))
    learner.learn(make_task(0))
    assert learner.network._compact.is_worthwhile(0) == (bound is None)
