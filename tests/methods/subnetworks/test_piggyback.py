"""Piggyback: one frozen network, and a choice of its weights for each task."""

import torch
from method_samples import QUICK

import cps
from cps.methods.subnetworks.piggyback import Piggyback
from samples import conv_net, make_task


def learned(fabric, *, frozen=False, tasks=2, **settings):
    torch.manual_seed(0)
    backbone = conv_net()
    if frozen:
        for name in ("0.weight", "3.weight"):
            dict(backbone.named_parameters())[name].requires_grad_(False)
    method = Piggyback(backbone, fabric=fabric, **{"train": QUICK, "mask_train": QUICK, **settings})
    for index in range(tasks):
        method.learn(make_task(10 * index))
    return method


def test_the_first_task_trains_the_network_and_later_ones_choose_among_its_weights(fabric):
    method = learned(fabric, tasks=1)
    assert method.network.density(0) == 1
    weights = {name: weight.clone() for name, weight in method.network.weights.items()}
    method.learn(make_task(10))
    assert all(torch.equal(weights[name], weight) for name, weight in method.network.weights.items())


def test_a_frozen_backbone_is_never_trained(fabric):
    method = learned(fabric, frozen=True, score_optimizer=cps.Adam(1e-2, weight_decay=0.0))
    torch.manual_seed(0)
    came = dict(conv_net().named_parameters())
    assert all(torch.equal(weight.cpu(), came[name]) for name, weight in method.network.weights.items())
    first, second = (each.masks for each in method.network.subnetworks)
    assert 0 < method.network.density(0) < 1
    assert any(not torch.equal(mask, second[name]) for name, mask in first.items())


def test_with_all_masks_on_a_subnetwork_is_the_backbone(fabric):
    method = learned(fabric, frozen=True, tasks=1, score_optimizer=cps.SGD(0.0))
    assert method.network.density(0) == 1
    masked, came = method.network.tensors_of(0), dict(method.backbone.named_parameters())
    assert all(torch.equal(masked[name].cpu(), came[name]) for name in method.network.weights)


def test_choosing_among_random_weights_learns_a_task(fabric):
    train = cps.Training(20, cps.Adam(1e-3, weight_decay=0.0), batch_size=16)
    optimizer = cps.Adam(1e-3, weight_decay=0.0)
    method = learned(fabric, frozen=True, tasks=0, mask_train=train, score_optimizer=optimizer)
    task = make_task(0, images=96)
    method.learn(task)
    assert method.predict(task.test[0], task=0).classes == task.test[1]
