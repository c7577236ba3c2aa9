"""RWalk: running Fisher information and scores of windows."""

import pytest
import torch
from method_samples import MEMORY, QUICK, learn_two_tasks, make, same_trajectory
from torch import nn

import cps
from cps.data.examples import TensorExamples
from cps.methods.regularization.importance import flat_parameters
from cps.methods.regularization.quadratic_penalty import Penalized
from cps.methods.regularization.rwalk import RWalk, WindowedPath, scaled
from cps.methods.regularization.separate_heads import SeparateHeads
from cps.methods.task_training import TaskTraining
from cps.network.classifier import Classifier
from samples import make_task


def logistic():
    """Return a model with p(class 0 | x) = sigmoid(theta x) and theta = 0."""
    model = Classifier(nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False))
    with torch.no_grad():
        model.backbone.weight.zero_()
        model.head.weight.copy_(torch.tensor([[1.0], [0.0]]))
    model.head.requires_grad_(False)
    return model


def test_it_keeps_the_contract_of_methods(fabric):
    cps.check_method(lambda backbone: RWalk(backbone, train=QUICK, window=3, fabric=fabric))


def test_two_windows_of_one_weight_are_as_worked_by_hand():
    """Log-likelihood of class 0 for x = 1: the gradient at theta is sigmoid(theta) - 1, and its square is the Fisher."""
    objective = WindowedPath(logistic(), 0, 0.0, rate=0.5, window=2, damping=0.01)
    optimizer = torch.optim.SGD(objective.student.backbone.parameters(), 0.4)
    theta, fisher, score = 0.0, 0.25, 0.0

    def gradient(theta):
        return torch.tensor(theta).sigmoid().item() - 1

    for _ in range(2):
        path, start = 0.0, theta
        for _ in range(2):
            optimizer.zero_grad()
            objective(torch.ones(1, 1), torch.zeros(1).long(), cps.CrossEntropy()).backward()
            objective.before_step()
            optimizer.step()
            objective.after_step()
            move = -0.4 * gradient(theta)
            path, theta = path - gradient(theta) * move, theta + move
        score += path / (fisher * (theta - start) ** 2 / 2 + 0.01)
        fisher = 0.5 * gradient(theta) ** 2 + 0.5 * fisher
    assert objective.student.backbone.weight.item() == pytest.approx(theta, rel=1e-5)
    assert objective.score.item() == pytest.approx(score, rel=1e-4)
    assert objective.fisher.item() == pytest.approx(fisher, rel=1e-4)


def test_after_the_first_task_the_score_is_that_of_the_task_and_then_the_mean_with_the_one_before(fabric):
    scores = []

    class Watched(RWalk):
        """RWalk that keeps the score of each task."""

        def objective(self, task):
            self.last = super().objective(task)
            return self.last

        def train_task(self, task):
            super().train_task(task)
            scores.append(self.last.score.clone())

    method = make(Watched, fabric, window=3)
    method.learn(make_task(0))
    assert torch.equal(method.buffers["score"], scores[0])
    method.learn(make_task(10))
    torch.testing.assert_close(method.buffers["score"], (scores[0] + scores[1]) / 2)
    assert scores[1].max() > 0


def test_without_scores_the_penalty_is_that_of_the_scaled_fisher(fabric):
    method = make(RWalk, fabric, window=3, strength=2.0)
    method.learn(make_task(0))
    method.buffers["score"].zero_()
    objective = method.objective(TaskTraining(method, TensorExamples(*make_task(10).train), 0, None, None))
    expected = Penalized(method.model, 2, 2.0, scaled(method.buffers["fisher"]))
    with torch.no_grad():
        for parameter in method.model.backbone.parameters():
            parameter += 0.1
    assert objective.penalty().item() > 0
    torch.testing.assert_close(objective.penalty(), expected.penalty())


@pytest.mark.parametrize(("setting", "must"), [({"window": 0}, "above 0"), ({"strength": -1.0}, "0 or more")])
def test_wrong_numbers_raise(fabric, setting, must):
    with pytest.raises(ValueError, match=f"of RWalk must be {must}"):
        make(RWalk, fabric, **setting)


def test_values_are_scaled_to_one():
    assert scaled(torch.tensor([1.0, 3.0, 2.0])).tolist() == [0, 1, 0.5]
    assert scaled(torch.zeros(3)).tolist() == [0, 0, 0]


def test_the_first_task_is_finetuning_and_without_strength_all_are(fabric):
    tasks = [make_task(10 * index) for index in range(3)]
    assert same_trajectory(make(RWalk, fabric, window=3), make(SeparateHeads, fabric), tasks[:1])
    assert same_trajectory(make(RWalk, fabric, window=3, strength=0.0), make(SeparateHeads, fabric), tasks)
    assert not same_trajectory(make(RWalk, fabric, window=3), make(SeparateHeads, fabric), tasks)


def test_with_a_few_images_of_old_classes_the_loss_is_over_all_classes(fabric):
    method = make(RWalk, fabric, window=3, memory=MEMORY)
    for index in range(2):
        method.learn(make_task(10 * index))
    assert method.assumes.replay
    assert len(method.exemplars) == 20


def test_it_holds_old_scores_and_learns_the_new_task(fabric):
    train = cps.Training(10, cps.Adam(1e-2), batch_size=16)
    free, _ = learn_two_tasks(make(SeparateHeads, fabric, train=train))
    held, accuracy = learn_two_tasks(make(RWalk, fabric, train=train, window=5))
    assert held < free / 2
    assert accuracy > 0.8


def test_it_keeps_two_vectors_as_large_as_the_backbone_and_four_more_while_it_learns(fabric):
    method = make(RWalk, fabric, window=3)
    method.learn(make_task(0))
    size = flat_parameters(method.model.backbone).nbytes
    assert method.kept()["statistics"] == 2 * size
    assert method.kept(learning=True)["copies"] == 4 * size
