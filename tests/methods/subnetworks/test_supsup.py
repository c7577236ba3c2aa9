"""SupSup: masks over random weights, and its ways to find the task."""

import pytest
import torch
from method_samples import QUICK
from torch import nn

import cps
from cps.methods.subnetworks.one_shot import MixtureEntropy, OneShot
from cps.methods.subnetworks.supsup import SupSup
from cps.selection.entropy import Entropy, entropy
from samples import conv_net, make_task

LONG = cps.Training(30, cps.Adam(1e-2, weight_decay=0.0), batch_size=16)


def learned(fabric, tasks=2, images=24, **settings):
    torch.manual_seed(0)
    method = SupSup(conv_net(), fabric=fabric, **{"train": QUICK, **settings})
    for index in range(tasks):
        method.learn(make_task(10 * index, images=images))
    return method


def test_weights_are_signed_constants_that_never_change(fabric):
    method = learned(fabric)
    for name, fan_in in (("0.weight", 2 * 9), ("3.weight", 8 * 9)):
        weight = method.network.weights[name]
        assert weight.abs().unique().tolist() == pytest.approx([(2 / fan_in) ** 0.5])
        assert 0.3 < (weight > 0).float().mean() < 0.7
        torch.testing.assert_close(learned(fabric, tasks=0).network.weights[name], weight, rtol=0, atol=0)
    assert [int(each.masks["3.weight"].sum()) for each in method.network.subnetworks] == [round(0.3 * 864)] * 2


def test_it_finds_tasks_by_entropy(fabric):
    optimizer = cps.Adam(1e-2, weight_decay=0.0)
    method = learned(fabric, images=96, train=LONG, score_optimizer=optimizer, shared_norms=True)
    assert method.selector == Entropy()
    tasks = [make_task(10 * index, images=96) for index in range(2)]
    for index, task in enumerate(tasks):
        for selector in (Entropy(), OneShot()):  # far apart, so both ways find the task
            assert (method.predict(task.test[0], selector=selector, group_size=6).tasks == index).all()
        assert method.predict(task.test[0], task=index).classes == task.test[1]


def test_the_one_shot_score_is_the_gradient_of_the_entropy_of_a_mixture(fabric):
    """Compare the derivative in each direction with a difference quotient in double precision."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.Tanh()).double()
    method = SupSup(backbone, train=QUICK, shared_norms=True)
    for index in range(3):
        method.learn(make_task(10 * index, shape=(6,)))
    images = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    found = method.evidence(images).features(MixtureEntropy(3))
    assert found.shape == (4, 3)
    network = method.network
    parts = [network.tensors_of(task) for task in range(3)]
    heads = [each.head for each in network.subnetworks]

    def entropies(shares):
        weight = sum(share * part["1.weight"] for share, part in zip(shares, parts, strict=True))
        features = torch.tanh(images.double() @ weight.T + parts[0]["1.bias"]).float()
        logits = sum(s * (features @ h["weight"].T + h["bias"]) for s, h in zip(shares, heads, strict=True))
        return entropy(logits)

    for task in range(3):
        step = 1e-2 * torch.eye(3)[task]
        quotient = (entropies(1 / 3 + step) - entropies(1 / 3 - step)) / 2e-2
        torch.testing.assert_close(found[:, task].float(), quotient, rtol=2e-2, atol=2e-3)


def test_one_shot_selection_needs_norms_that_all_tasks_share(fabric):
    images = make_task(0).test[0]
    with pytest.raises(ValueError, match="use shared_norms=True"):
        learned(fabric).predict(images, selector=OneShot())
    method = learned(fabric, tasks=1, shared_norms=True)
    method.learn(make_task(10, classes=3))
    with pytest.raises(ValueError, match="tasks with equally many classes"):
        method.predict(images, selector=OneShot())
