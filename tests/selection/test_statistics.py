"""Statistics that are kept about a task must be finite tensors that a model file can hold."""

import pytest
import torch

import cps
from samples import Counts, ListDataset, conv_net, make_task


def test_integer_statistics_round_trip_through_a_file(make_learner, tmp_path):
    cps.check_selector(Counts())
    learner = make_learner(selectors=[Counts()])
    learner.learn(make_task(0))
    learner.save(tmp_path / "model.cps")
    kept = cps.load(tmp_path / "model.cps", conv_net(), selectors=[Counts()]).network.statistics("Counts")[0]
    assert kept["counts"].tolist() == learner.network.statistics("Counts")[0]["counts"].tolist()


@pytest.mark.parametrize("kept", [{1: torch.ones(2)}, {"list": [1.0]}, {"complex": torch.ones(2) * 1j}])
def test_statistics_that_a_file_cannot_hold_raise(make_learner, kept):
    class Invalid(Counts):
        def observe(self, subnetwork, evidence, labels, earlier):
            return kept

    learner = make_learner(selectors=[Invalid()])
    with pytest.raises(TypeError, match="Counts.observe must return real tensors by name"):
        learner.learn(make_task(0))


def test_nan_statistics_raise_and_the_task_is_undone(make_learner):
    class KeepsNaN(cps.MaxOutput):
        def observe(self, subnetwork, evidence, labels, earlier):
            return {"mean": torch.tensor([0.0, torch.nan])}

    learner = make_learner(selectors=[KeepsNaN()])
    with pytest.raises(FloatingPointError, match="KeepsNaN.observe returned NaN in 'mean'"):
        learner.learn(make_task(0))
    assert learner.network.subnetworks == []


def test_a_subnetwork_with_outputs_that_are_not_finite_is_not_kept(make_learner):
    learner = make_learner(train=cps.Training(1, cps.SGD(1e38, momentum=0), batch_size=64), rounds=0)
    with pytest.raises(FloatingPointError, match="lower the learning rate"):
        learner.learn(make_task(0))
    assert learner.network.subnetworks == []


def test_a_class_without_images_in_a_dataset_is_logged(make_learner, caplog):
    make_learner().learn(cps.Task(["a", "b"], train=ListDataset(torch.rand(12, 2, 6, 6), ["a"] * 12)))
    assert "class 'b' had no training image" in caplog.text
