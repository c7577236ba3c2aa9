"""Heads grow, and weight aligning changes no order inside the old and inside the new classes."""

import torch

from cps.methods.blocks.heads import align_weights, grow_linear, guard_rows, nearest_mean_scores
from cps.network.freezing import make_restore


def test_a_head_grows_by_rows_that_its_generator_draws():
    first = grow_linear(None, 3, 2, torch.Generator().manual_seed(0))
    grown = grow_linear(first, 3, 2, torch.Generator().manual_seed(1))
    other = grow_linear(None, 3, 2, torch.Generator().manual_seed(1))
    assert torch.equal(grown.weight[:2], first.weight)
    assert torch.equal(grown.weight[2:], other.weight)
    assert torch.equal(grown.bias, torch.cat([first.bias, other.bias]))


def test_a_head_grows_for_more_features_and_keeps_its_block_of_weights():
    first = grow_linear(None, 3, 2, torch.Generator().manual_seed(0))
    grown = grow_linear(first, 5, 1, torch.Generator().manual_seed(1))
    assert torch.equal(grown.weight[:2, :3], first.weight)
    assert grown.weight.shape == (3, 5)
    assert grown.weight.abs().min() > 0
    assert torch.equal(grown.bias[:2], first.bias)


def test_a_guard_of_rows_restores_them_and_no_others():
    head = grow_linear(None, 3, 4, torch.Generator().manual_seed(0))
    before = head.weight.detach().clone()
    restore = make_restore(guard_rows(head, 3), {f"head.{name}": value for name, value in head.named_parameters()})
    with torch.no_grad():
        for value in head.parameters():
            value += 1
    restore()
    assert torch.equal(head.weight[:3], before[:3])
    assert torch.equal(head.weight[3], before[3] + 1)
    assert head.bias[3] > head.bias[:3].max()


def test_aligned_weights_have_the_same_mean_length_and_the_same_order_inside_old_and_new_classes():
    head = grow_linear(None, 4, 5, torch.Generator().manual_seed(0))
    with torch.no_grad():
        head.weight[3:] *= 4
        head.bias.zero_()
    features = torch.randn(50, 4, generator=torch.Generator().manual_seed(1))
    before = head(features).detach()
    factor = align_weights(head, 3)
    lengths = head.weight.norm(dim=1)
    torch.testing.assert_close(lengths[:3].mean(), lengths[3:].mean())
    after = head(features).detach()
    assert torch.equal(after[:, :3], before[:, :3])
    torch.testing.assert_close(after[:, 3:], factor * before[:, 3:])


def test_the_nearest_mean_has_the_largest_score_whatever_the_lengths():
    means = torch.tensor([[2.0, 0.0], [0.0, 0.1]])
    scores = nearest_mean_scores(torch.tensor([[5.0, 4.0], [0.1, 0.2], [1.0, 0.0]]), means)
    assert scores.argmax(dim=1).tolist() == [0, 1, 0]
    torch.testing.assert_close(scores[2], torch.tensor([0.0, -2.0]))
