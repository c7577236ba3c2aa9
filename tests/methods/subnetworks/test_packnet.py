"""PackNet: what it prunes, and what a task uses."""

import pytest
import torch
from method_samples import QUICK

from cps.methods.blocks.owners import find_owners, masks_of
from cps.methods.subnetworks.packnet import PackNet
from samples import conv_net, make_task


def learned(fabric, tasks=3, **settings):
    torch.manual_seed(0)
    method = PackNet(conv_net(), train=QUICK, retrain=QUICK, fabric=fabric, **settings)
    for index in range(tasks):
        method.learn(make_task(10 * index))
    return method


def test_a_task_uses_the_weights_of_all_earlier_tasks_and_its_own(fabric):
    masks = [each.masks for each in learned(fabric).network.subnetworks]
    owners = find_owners(masks)
    for task, expected in enumerate(masks):
        found = masks_of(owners, task)
        assert all(torch.equal(found[name], mask) for name, mask in expected.items())
    sizes = torch.bincount(owners["3.weight"].flatten())  # of 12 x 8 x 3 x 3 weights
    assert sizes.tolist() == [108, 432, 216, 108]  # free, and half of what is free for each task


def test_with_the_number_of_tasks_each_owns_equally_many_weights(fabric):
    torch.manual_seed(0)
    method = PackNet(conv_net(), train=QUICK, retrain=QUICK, tasks=4, fabric=fabric)
    assert [method.pruned_share(task) for task in range(4)] == [3 / 4, 2 / 3, 1 / 2, 0]
    for index in range(4):
        method.learn(make_task(10 * index))
    owners = find_owners([each.masks for each in method.network.subnetworks])
    assert torch.bincount(owners["3.weight"].flatten()).tolist() == [0, 216, 216, 216, 216]


def test_pruned_weights_are_zero_when_the_next_task_begins(fabric):
    method = learned(fabric, tasks=1)
    for name, weight in method.network.weights.items():
        assert (weight[~method.network.taken[name]] == 0).all()
        assert (weight[method.network.taken[name]] != 0).all()


def test_without_pruning_the_first_task_takes_everything(fabric):
    method = learned(fabric, tasks=1, prune=0.0)
    assert method.network.free_share() == 0


def test_it_keeps_one_owner_for_each_weight(fabric):
    method = learned(fabric, tasks=3)
    weights = 2 * 8 * 9 + 8 * 12 * 9
    assert method.kept()["masks"] == -(-2 * 144 // 8) + 2 * (weights - 144) // 8  # two bits tell four owners


def test_wrong_settings_raise(fabric):
    with pytest.raises(ValueError, match="prune must be a share"):
        PackNet(conv_net(), prune=1.0, fabric=fabric)
    method = PackNet(conv_net(), train=QUICK, retrain=QUICK, tasks=1, fabric=fabric)
    method.learn(make_task(0))
    with pytest.raises(ValueError, match="among 1 tasks; make it with tasks=2"):
        method.learn(make_task(10))
