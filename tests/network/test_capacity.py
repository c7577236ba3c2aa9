"""How many weights a task may take, and what happens when few are free."""

import pytest
import torch
from torch import nn

import cps
from samples import make_task

KEEP_ALL = cps.NNrelief(alpha=1.0)


def test_a_network_without_free_weights_warns(make_learner):
    learner = make_learner(rounds=0)
    learner.learn(make_task(0))
    with pytest.warns(cps.CapacityWarning, match=r"2 of 2 layers .* \('0' 0.0%"):
        learner.learn(make_task(10))


def test_a_network_with_nothing_left_to_train_raises_capacity_error(make_learner):
    bare = nn.Sequential(nn.Flatten(), nn.Linear(72, 8, bias=False), nn.ReLU())
    learner = make_learner(bare, rounds=0)
    learner.learn(make_task(0))
    before = learner.fingerprint(0)
    with pytest.raises(cps.CapacityError, match="no free weights"):
        learner.learn(make_task(10))
    assert learner.fingerprint(0) == before


def test_a_task_takes_no_more_of_a_layer_than_its_budget(make_learner):
    learner = make_learner(pruner=KEEP_ALL, capacity=cps.Capacity(budget=0.125))  # an eighth for each of two classes
    for index in range(3):
        before = {name: mask.clone() for name, mask in learner.network.taken.items()}
        learner.learn(make_task(10 * index))
        for name, mask in learner.network.taken.items():
            assert int((mask & ~before[name]).sum()) == int(0.25 * mask.numel())
    assert learner.network.free_share() == pytest.approx(0.25)


def test_each_round_of_pruning_approaches_the_budget_by_the_same_factor(make_learner):
    counts = []

    def count(backbone, masks, batches):
        counts.append(sum(int(mask.sum()) for mask in masks.values()))
        return masks

    learner = make_learner(pruner=count, rounds=3, capacity=cps.Capacity(budget=0.005))
    learner.learn(make_task())
    counts.append(sum(int(mask.sum()) for mask in learner.network.taken.values()))
    sizes = [mask.numel() for mask in learner.network.taken.values()]
    assert counts == [sum(max(1, int(0.01 ** (done / 3) * size)) for size in sizes) for done in range(4)]


def test_a_budget_keeps_the_largest_new_weights_and_does_not_count_sealed_ones():
    weight = torch.tensor([[5.0, -4.0, 1.0, 3.0], [2.0, 6.0, 0.5, 7.0]])
    taken = torch.tensor([[True, False, False, False], [False, False, False, True]])
    mask = torch.tensor([[True, True, True, True], [True, True, True, False]])
    kept = cps.Capacity(budget=0.05).limit({"a": mask}, {"a": taken}, {"a": weight}, 5)["a"]
    assert kept.tolist() == [[True, True, False, False], [False, True, False, False]]
    assert cps.Capacity().limit({"a": mask}, {"a": taken}, {"a": weight}, 5)["a"] is mask


@pytest.mark.parametrize("wrong", [{"min_free": 1.5}, {"min_free": -0.1}, {"budget": 0.0}, {"budget": 2.0}])
def test_min_free_and_budget_must_be_shares(wrong):
    with pytest.raises(ValueError, match="must be in"):
        cps.Capacity(**wrong)
