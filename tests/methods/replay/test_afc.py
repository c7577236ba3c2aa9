"""AFC: importances of channels, and what they weigh."""

import pytest
import torch
from method_samples import LONGER, MEMORY, QUICK, right_after_three_tasks, same_trajectory

import cps
from cps.methods.blocks.memory import Memory
from cps.methods.cosine.feature_distillation import channel_distance
from cps.methods.cosine.similarity_losses import nca_loss
from cps.methods.cosine.stage_maps import features_and_maps
from cps.methods.replay.afc import AFC, normalize_importance, squared_gradients
from cps.methods.replay.podnet import PODNet
from samples import make_task

BALANCED = cps.Training(1, cps.SGD(0.05), batch_size=8)


def make(kind, fabric, **settings):
    torch.manual_seed(0)
    quick = {"train": QUICK, "memory": MEMORY, "balanced": BALANCED, "proxies": 2}
    return kind(cps.SmallConvNet(2, widths=(4, 6)), fabric=fabric, **{**quick, **settings})


def importances(method):
    return [value for name, value in sorted(method.buffers.items()) if name.startswith("importance/")]


def test_it_keeps_the_contract_of_methods(fabric):
    settings = {"train": QUICK, "memory": MEMORY, "balanced": BALANCED, "proxies": 2, "fabric": fabric}
    cps.check_method(lambda backbone: AFC(backbone, **settings))


def test_importances_of_two_channels_are_as_worked_by_hand():
    """Two images, loss = sum over pixels of 3 a + b c with c = 1 and 2: squares 4 * 9 each, and 4 * 1 and 4 * 4."""
    maps = torch.randn(2, 2, 2, 2, requires_grad=True)
    losses = (3 * maps[:, 0]).sum(dim=(1, 2)) + torch.tensor([1.0, 2.0]) * maps[:, 1].sum(dim=(1, 2))
    (sums,) = squared_gradients(losses.sum(), [maps])
    torch.testing.assert_close(sums, torch.tensor([72.0, 20.0]))
    torch.testing.assert_close(normalize_importance(sums / 2), torch.tensor([72.0, 20.0]) / 46)
    assert torch.equal(normalize_importance(torch.zeros(3)), torch.ones(3))


def test_importances_have_mean_one_and_are_those_of_the_last_training(fabric):
    method = make(AFC, fabric, margin=5.0)  # no image has all of the margin
    before = None
    for index in range(2):
        method.learn(make_task(10 * index))
        found = importances(method)
        assert [len(each) for each in found] == [4, 6]
        assert all(each.mean().item() == pytest.approx(1, abs=1e-6) for each in found)
        assert before is None or not torch.equal(before[0], found[0])
        before = found
    assert method.kept()["statistics"] == 4 * (4 + 6)


def test_importances_are_the_squared_gradients_of_each_image_alone(fabric):
    method = make(AFC, fabric, margin=5.0)
    task = make_task(0, images=5)
    method.learn(task)
    backbone, sums = method.model.backbone.eval(), torch.zeros(6)
    for image, label in zip(*task.train, strict=True):
        features, maps = features_and_maps(backbone, image[None])
        nca_loss(method.head.similarities(features), torch.tensor([label]), method.head.scale, 5.0).backward(
            inputs=maps
        )
        sums += maps[1].grad.square().sum(dim=(2, 3))[0]
    torch.testing.assert_close(importances(method)[1], sums / sums.mean())


def test_the_distance_of_maps_is_weighed_by_the_importances(fabric):
    method = make(AFC, fabric)
    method.learn(make_task(0))
    maps, others = ([torch.randn(2, 4, 6, 6), torch.randn(2, 6, 3, 3)] for _ in range(2))
    expected = channel_distance(maps, others, importances(method))
    torch.testing.assert_close(method.map_distance()(maps, others), expected)


def test_without_distances_it_is_podnet_without_them_to_the_bit(fabric):
    tasks = [make_task(10 * index) for index in range(3)]
    settings = {"map_weight": 0.0, "feature_weight": 0.0}
    assert same_trajectory(make(AFC, fabric, **settings), make(PODNet, fabric, **settings), tasks)
    assert not same_trajectory(make(AFC, fabric), make(PODNet, fabric), tasks)


def test_it_remembers(fabric):
    method = make(AFC, fabric, train=LONGER, memory=Memory(60), scale=5.0)
    assert min(right_after_three_tasks(method)) > 9
