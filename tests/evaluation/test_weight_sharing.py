"""How tasks share the weights, compared with a count by hand."""

import pytest
import torch

from cps.evaluation.weight_sharing import measure_weight_sharing
from samples import make_task


def test_shares_of_weights_equal_a_count_of_the_masks(make_learner):
    learner = make_learner()
    for first in (0, 10):
        learner.learn(make_task(first))
    weights = learner.network.weights
    first, second = (
        {name: mask.expand_as(weights[name]) for name, mask in subnetwork.masks.items()}
        for subnetwork in learner.network.subnetworks
    )
    sharing = measure_weight_sharing(learner.network)
    total = sum(weight.numel() for weight in weights.values())
    assert sharing.weights == total

    def percent(values):
        return 100 * sum(int(value.sum()) for value in values) / total

    assert sharing.density == pytest.approx([percent(first.values()), percent(second.values())])
    union = {name: first[name] | second[name] for name in weights}
    both = {name: first[name] & second[name] for name in weights}
    assert sharing.taken == pytest.approx([percent(first.values()), percent(union.values())])
    counts = torch.cat([(first[name].int() + second[name].int()).flatten() for name in weights]).bincount(minlength=3)
    assert sharing.sharing == pytest.approx((100 * counts / total).tolist())
    for layer, (name, weight) in zip(sharing.layers, weights.items(), strict=True):
        assert f"{layer.name}.weight" == name
        assert layer.union == pytest.approx(100 * float(union[name].sum()) / weight.numel())
        assert layer.intersection == pytest.approx(100 * float(both[name].sum()) / weight.numel())
