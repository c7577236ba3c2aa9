"""The head of a subnetwork behind a trunk: how much its trained part and the closed form count."""

import torch

from cps.closed_form.classifiers import LinearScores
from cps.network.classifier import RootHead
from cps.training.joined_head import choose_weights, join_scores

LABELS = torch.arange(200) % 5


def make_scores(seed, *, signal):
    """Return scores with noise; `signal` is how much higher that of the true class is on average."""
    noise = torch.randn(len(LABELS), 5, generator=torch.Generator().manual_seed(seed))
    return noise + signal * torch.eye(5)[LABELS]


def test_the_better_scores_get_the_larger_weight():
    trained, closed = choose_weights(make_scores(0, signal=3.0), make_scores(1, signal=1.0), LABELS)
    assert trained > closed > 0
    assert choose_weights(make_scores(0, signal=1.0), make_scores(1, signal=3.0), LABELS)[1] > 1


def test_a_trained_head_counts_only_if_it_helps_by_more_than_chance():
    closed = make_scores(1, signal=2.0)
    assert choose_weights(make_scores(0, signal=0.0), closed, LABELS) == (0.0, 1.0)
    assert choose_weights(make_scores(0, signal=-1.0), closed, LABELS) == (0.0, 1.0)
    few = slice(0, 20)
    slightly = make_scores(0, signal=0.4)
    assert choose_weights(slightly[few], closed[few], LABELS[few]) == (0.0, 1.0)
    assert choose_weights(make_scores(0, signal=2.0), closed, LABELS)[0] > 0  # negative control


def test_joined_scores_are_the_weighted_sum():
    draws = torch.Generator().manual_seed(0)
    features = torch.randn(6, 7, generator=draws)
    parts = [
        LinearScores(
            torch.randn(size, generator=draws), torch.randn(size, 3, generator=draws), torch.randn(3, generator=draws)
        )
        for size in (4, 3)
    ]
    joined = join_scores(*parts, 2.0, 0.5)
    torch.testing.assert_close(joined(features), 2.0 * parts[0](features[:, :4]) + 0.5 * parts[1](features[:, 4:]))


def test_a_head_reads_the_direction_of_square_roots_and_its_gradient_is_finite_at_zero():
    head = RootHead(4, 2)
    features = torch.tensor([[0.0, 4.0, -9.0, 1.0]], requires_grad=True)
    logits = head(features)
    torch.testing.assert_close(head(7 * features), logits, rtol=1e-3, atol=1e-3)
    direction = torch.tensor([[0.0, 2.0, -3.0, 1.0]]) / 14**0.5
    expected = RootHead.SCALE * direction @ head.weight.T + head.bias
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    logits.sum().backward()
    assert features.grad.isfinite().all()
