"""Algorithm 2: select the task with the highest score, then classify with its subnetwork."""

import pytest
import torch

import cps
from cps.network.outputs import Evidence, Outputs
from cps.selection.groups import mean_by_group
from cps.selection.predict import best_task, select
from samples import Counts, make_task

IMAGES, _ = make_task(10).train


def test_a_task_with_a_nan_score_is_not_the_best_task():
    scores = torch.tensor([[1.0, torch.nan], [torch.nan, -torch.inf], [0.0, 1.0]])
    assert best_task(scores).tolist() == [0, 1, 1]


def test_a_task_with_nan_scores_is_not_selected_and_a_warning_says_so(make_learner, caplog):
    class HalfNaN(Counts):
        def __call__(self, evidence, statistics, groups):
            scores = torch.zeros(int(groups.max()) + 1, len(evidence), device=groups.device)
            scores[:, 0] = torch.nan
            return scores

    learner = make_learner(selectors=[HalfNaN()])
    learner.learn(make_task(0))
    learner.learn(make_task(10))
    assert set(learner.predict(make_task(0).test[0]).tasks.tolist()) == {1}
    assert "returned NaN scores" in caplog.text


class FixedScores:
    """A selector that scores every image 1 for task 0 and 0 for task 1."""

    name = "FixedScores"

    def __call__(self, evidence, statistics, groups):
        return mean_by_group(torch.tensor([[1.0, 0.0]]).expand(len(groups), 2), groups)


@pytest.mark.parametrize("size", [1, 4, 9])
def test_the_share_of_a_group_grows_with_the_square_root_of_its_size(size):
    evidence = Evidence(lambda tasks: [Outputs(torch.zeros(9, 3), torch.zeros(9, 2)) for _ in tasks], 2)
    groups = torch.arange(9) // size
    selection = select(FixedScores(), evidence, [{}, {}], groups)
    torch.testing.assert_close(selection.share, groups.bincount().sqrt()[groups].sigmoid())
    assert selection.tasks.tolist() == [0] * 9


class PerImage(cps.MaxOutput):
    """Returns a score per image instead of per group."""

    name = "PerImage"

    def __call__(self, evidence, statistics, groups):
        return self.score_images(list(evidence), statistics)


def test_scores_of_another_shape_raise(make_learner):
    learner = make_learner(selectors=[PerImage()])
    learner.learn(make_task(0))
    images = make_task(0).test[0]
    assert learner.predict(images).classes
    with pytest.raises(ValueError, match=r"PerImage must return scores of shape \(groups, tasks\) \(2, 1\)"):
        learner.predict(images[:8], group_size=4)


def test_a_selector_without_statistics_raises(learned):
    with pytest.raises(ValueError, match="has no 'mean' statistics"):
        learned.predict(IMAGES, selector=cps.ImportanceSignature(norm=1))


def test_selectors_do_not_run_under_the_callers_autocast(make_learner):
    class RecordAutocast(cps.MaxOutput):
        name = "RecordAutocast"

        def __call__(self, evidence, statistics, groups):
            is_enabled.append(torch.is_autocast_enabled(groups.device.type))
            return super().__call__(evidence, statistics, groups)

    is_enabled = []
    learner, task = make_learner(selectors=[RecordAutocast()]), make_task(0)
    learner.learn(task)
    with torch.autocast(learner.network.device.type, torch.bfloat16):
        learner.predict(task.test[0])
        learner.stream().predict(task.test[0])
        cps.evaluate(learner, [task], group_sizes=[1])
    assert is_enabled == [False] * 4  # of the prediction, the stream, and the evaluation with its confusion matrix
