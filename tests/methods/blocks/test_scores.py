"""Scores of weights, and the optimizer that trains them."""

import copy

import pytest
import torch
from torch import nn

import cps
from cps.methods.blocks.joint_optimizer import JointOptimizer
from cps.methods.blocks.scores import Above, ScoredWeights, TopShare, straight_through, uniform_scores
from cps.network.classifier import Classifier


@pytest.mark.parametrize(("share", "ones"), [(0.5, 4), (0.3, 2), (0.01, 1), (1.0, 7)])
def test_the_top_share_is_exact(share, ones):
    scores = torch.tensor([0.1, -0.7, 0.3, -0.2, 0.5, 0.5, 0.5])  # with ties
    mask = TopShare(share).mask(scores)
    assert int(mask.sum()) == ones
    assert mask[1]


def test_scores_above_the_threshold_are_on():
    assert Above(0.005).mask(torch.tensor([0.01, 0.005, -1.0, 0.0051])).tolist() == [True, False, False, True]


def test_gradients_pass_straight_through_to_the_scores():
    scores = torch.tensor([0.3, -0.2, 0.01], requires_grad=True)
    for rule, values, gradient in (
        (Above(0.1), [1.0, 0.0, 0.0], [2.0, 3.0, 5.0]),
        (TopShare(0.5), [1.0, 1.0, 0.0], [2.0, -3.0, 5.0]),  # a larger absolute score is a smaller negative one
    ):
        mask = straight_through(rule, scores, rule.mask(scores))
        assert mask.tolist() == values
        scores.grad = None
        (mask * torch.tensor([2.0, 3.0, 5.0])).sum().backward()
        assert scores.grad.tolist() == gradient


def objective(weight, scores, rule, **options):
    backbone = nn.Linear(2, 2, bias=False)
    student = Classifier(backbone, nn.Linear(2, 2))
    with torch.no_grad():
        backbone.weight.copy_(torch.tensor(weight))
    return ScoredWeights(student, {"weight": torch.tensor(scores)}, rule, cps.Adam(1e-3, weight_decay=0.0), **options)


def test_the_gradient_of_a_score_is_that_of_the_effective_weight_times_the_weight():
    model = objective([[2.0, -1.0], [0.5, 4.0]], [[1.0, 0.0], [0.0, 1.0]], Above(0.5))
    pixels = torch.tensor([[3.0, 7.0]])

    def loss(features, logits, labels):
        assert features.tolist() == [[6.0, 28.0]]  # without the weights that are off
        return (features * torch.tensor([1.0, 10.0])).sum()

    model(pixels, torch.tensor([0]), loss).backward()
    effective = torch.tensor([[3.0, 7.0], [30.0, 70.0]])  # dL / d(W m), also where m is 0
    assert torch.equal(model.values[0].grad, effective * torch.tensor([[2.0, -1.0], [0.5, 4.0]]))
    assert torch.equal(model.student.backbone.weight.grad, effective * torch.eye(2))  # none for weights that are off


def test_weights_that_are_not_choosable_are_on_whatever_their_scores():
    choosable = {"weight": torch.tensor([[True, True], [False, False]])}
    model = objective([[2.0, -1.0], [0.5, 4.0]], [[1.0, 0.0], [0.0, 0.0]], Above(0.5), choosable=choosable)
    assert model.effective_weights()["weight"].tolist() == [[2.0, 0.0], [0.5, 4.0]]
    assert model.masks()["weight"].tolist() == [[True, False], [True, True]]
    model(torch.ones(1, 2), torch.tensor([0]), cps.CrossEntropy()).backward()
    assert (model.values[0].grad[1] == 0).all()


def test_neither_decay_nor_momentum_moves_weights_that_are_off():
    model = objective([[2.0, -1.0], [0.5, 4.0]], [[1.0, 0.0], [0.0, 1.0]], Above(0.5))
    weight = model.student.backbone.weight
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, weight_decay=0.1)

    def step(scores):
        with torch.no_grad():
            model.values[0].copy_(torch.tensor(scores))
        before = weight.detach().clone()
        optimizer.zero_grad()
        model(torch.ones(1, 2), torch.tensor([0]), cps.CrossEntropy()).backward()
        model.before_step()
        optimizer.step()
        model.after_step()
        return (weight != before).tolist()

    assert step([[1.0, 0.0], [0.0, 1.0]]) == [[True, False], [False, True]]
    assert step([[0.0, 1.0], [0.0, 1.0]]) == [[False, True], [False, True]]


def test_scores_are_drawn_like_weights_and_from_the_seed():
    weights = {"a": torch.empty(50, 8, 3, 3), "b": torch.empty(20, 100)}
    scores, again = (uniform_scores(weights, torch.Generator().manual_seed(0)) for _ in range(2))
    for name, limit in (("a", 72**-0.5), ("b", 0.1)):
        assert 0.99 * limit < scores[name].abs().max() <= limit
        assert torch.equal(scores[name], again[name])


def test_a_joint_optimizer_takes_the_steps_of_each_and_continues_from_its_state():
    def parameters():
        torch.manual_seed(0)
        return [nn.Parameter(torch.randn(3)) for _ in range(2)]

    def joint(weights):
        return JointOptimizer(
            [torch.optim.SGD(weights[:1], lr=0.1, momentum=0.9), torch.optim.Adam(weights[1:], lr=0.01)]
        )

    def step(weights, *optimizers):
        for weight in weights:
            weight.grad = 2 * weight.detach()
        for optimizer in optimizers:
            optimizer.step()

    together, apart = parameters(), parameters()
    one = joint(together)
    two = torch.optim.SGD(apart[:1], lr=0.1, momentum=0.9), torch.optim.Adam(apart[1:], lr=0.01)
    for _ in range(3):
        step(together, one)
        step(apart, *two)
    assert all(map(torch.equal, together, apart))
    resumed = [nn.Parameter(weight.detach().clone()) for weight in together]
    other = joint(resumed)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for group in (*one.param_groups, *other.param_groups, *two[0].param_groups, *two[1].param_groups):
        group["lr"] /= 2  # as a schedule does
    step(together, one)
    step(apart, *two)
    step(resumed, other)
    assert all(map(torch.equal, together, apart))
    assert all(map(torch.equal, together, resumed))
