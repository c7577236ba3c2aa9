"""WSN: weights and choices learned together."""

import pytest
import torch
from method_samples import QUICK

import cps
from cps.methods.subnetworks.wsn import WSN
from cps.network.masks import is_subset
from samples import conv_net, make_task


def learned(fabric, tasks=2, **settings):
    torch.manual_seed(0)
    method = WSN(conv_net(), fabric=fabric, **{"train": QUICK, **settings})
    for index in range(tasks):
        method.learn(make_task(10 * index))
    return method


def test_every_task_has_the_same_share_of_each_layer_and_the_union_only_grows(fabric):
    method, taken = learned(fabric, tasks=0, density=0.3), []
    for index in range(3):
        method.learn(make_task(10 * index))
        masks, before = method.network.subnetworks[-1].masks, taken[-1:]
        taken.append(method.network.taken)
        assert int(masks["3.weight"].sum()) == round(0.3 * 864)
        assert all(is_subset(each, taken[-1]) for each in (masks, *before))
    assert int(taken[0]["3.weight"].sum()) < int(taken[2]["3.weight"].sum())


def test_scores_carry_over_and_are_trained_by_their_own_optimizer(fabric):
    still = learned(fabric, score_optimizer=cps.SGD(0.0))
    first, second = (each.masks for each in still.network.subnetworks)
    assert all(torch.equal(mask, second[name]) for name, mask in first.items())
    moving = learned(fabric, score_optimizer=cps.Adam(0.1, weight_decay=0.0))
    first, second = (each.masks for each in moving.network.subnetworks)
    assert any(not torch.equal(mask, second[name]) for name, mask in first.items())
    assert moving.kept()["scores"] == sum(weight.nbytes for weight in moving.network.weights.values())


def test_weights_that_no_task_uses_carry_over_as_they_are(fabric):
    training = cps.Training(2, cps.Adam(1e-2, weight_decay=1e-2), batch_size=16)
    method = learned(fabric, tasks=0, density=0.3, score_optimizer=cps.SGD(0.0), train=training)
    came = {name: weight.clone() for name, weight in method.network.weights.items()}
    for index in range(2):
        method.learn(make_task(10 * index))
        for name, weight in method.network.weights.items():
            free = ~method.network.taken[name]
            assert (came[name][free] != 0).all()
            assert torch.equal(weight[free], came[name][free])
            assert not torch.equal(weight, came[name])


def test_with_full_density_the_first_task_takes_all_weights_and_later_ones_only_reuse_them(fabric):
    method = learned(fabric, density=1.0)
    assert method.network.free_share() == 0
    assert method.network.density(1) == 1


def test_a_density_outside_its_range_raises(fabric):
    with pytest.raises(ValueError, match="share of TopShare must be in"):
        WSN(conv_net(), density=0.0, fabric=fabric)
