"""Streams: images in order of arrival, whose task changes at unknown times."""

import copy

import pytest
import torch

import cps
from cps.network.outputs import Evidence, Outputs
from cps.selection.stream import OUTLIERS, TaskFilter
from samples import make_task


def test_a_stream_finds_the_task_of_uncertain_images_from_those_before(learner):
    draws = torch.Generator().manual_seed(3)
    order = torch.arange(3).repeat_interleave(40)
    images = torch.cat([make_task(first, test=60).test[0][:40] for first in (0, 10, 20)])
    images = images + 0.6 * torch.randn(images.shape, generator=draws)  # so that one image is not enough
    single = (learner.predict(images).tasks == order).float().mean()
    stream = learner.stream()
    found = torch.cat([stream.predict(part).tasks for part in images.split(7)])
    assert (found == order).float().mean() > single + 0.05
    assert stream.tasks.shape == (3,)
    torch.testing.assert_close(stream.tasks.sum(), torch.tensor(1.0))
    at_once = learner.stream().predict(images)
    assert torch.equal(at_once.tasks, found)  # the number of images per call makes no difference


def test_a_stream_can_reject_images(learner):
    images = make_task(0).train[0]
    assert None not in learner.stream().predict(images).classes
    rejected = learner.stream().predict(images, reject=0.5)
    assert 0 < sum(name is None for name in rejected.classes) < len(images)


def test_a_stream_restarts_when_another_task_has_been_learned(learner):
    learner = copy.deepcopy(learner)
    stream = learner.stream()
    stream.predict(make_task(0).test[0])
    assert stream.tasks.shape == (3,)
    learner.learn(make_task(30))
    stream.predict(make_task(0).test[0])
    assert stream.tasks.shape == (4,)


def test_a_stream_restarts_when_a_task_was_forgotten(learner):
    learner = copy.deepcopy(learner)
    stream = learner.stream(selector=cps.MaxOutput())
    stream.predict(make_task(0).test[0])
    learner.forget(2)
    stream.predict(make_task(0).test[0])
    assert stream.tasks.shape == (2,)


@pytest.mark.parametrize("outliers", [OUTLIERS, 0.0])
def test_one_confident_image_does_not_override_many_others(learner, monkeypatch, outliers):
    monkeypatch.setattr("cps.selection.stream.OUTLIERS", outliers)
    scores = torch.tensor([[1.0, 0.0, 0.0]] * 30 + [[0.0, 300.0, 0.0]] + [[1.0, 0.0, 0.0]] * 3)
    evidence = Evidence.of([Outputs(scores, scores[:, [task]].expand(-1, 2)) for task in range(3)])
    tasks = learner.stream(selector=cps.MaxOutput()).predict_evidence(evidence).tasks
    assert tasks[-1] == (0 if outliers else 1)  # the negative control: without outliers, one image decides
    assert OUTLIERS > 0


def test_a_stream_detects_changes_after_a_long_constant_period():
    tasks = TaskFilter(3)
    likelihoods = torch.full((3, 3), 0.15, dtype=torch.float64).fill_diagonal_(0.7)
    for _ in range(20_000):
        tasks._update(likelihoods[0])
    for task in (0, 1) * 20:  # a change with each image
        tasks._update(likelihoods[task])
    assert tasks.tasks.argmax() == 1


def test_an_image_with_nan_scores_does_not_change_the_posterior(learner):
    class SomeNaN(cps.MaxOutput):
        def __call__(self, evidence, statistics, groups):
            scores = super().__call__(evidence, statistics, groups)
            scores[1] = torch.nan
            return scores

    images = make_task(0).test[0][:6]
    stream = learner.stream(selector=SomeNaN())
    found = stream.predict(images).tasks
    assert stream.tasks.isfinite().all()
    assert torch.equal(found, learner.stream(selector=cps.MaxOutput()).predict(images).tasks)


def test_a_call_that_raises_does_not_change_the_posterior(learner):
    stream = learner.stream()
    stream.predict(make_task(0).test[0])
    before = stream.tasks
    with pytest.raises(ValueError, match="reject must be a share"):
        stream.predict(make_task(10).test[0], reject=2)
    assert torch.equal(stream.tasks, before)


def test_a_stream_raises_for_evidence_of_fewer_tasks_than_are_learned(learner):
    learner = copy.deepcopy(learner)
    evidence = learner.evidence(make_task(0).test[0])
    learner.learn(make_task(30))
    with pytest.raises(ValueError, match="the evidence has 3 tasks, but the network has 4"):
        learner.stream().predict_evidence(evidence)
