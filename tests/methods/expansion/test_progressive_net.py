"""ProgressiveNet: columns that stay, and connections that are learned."""

import pytest
import torch
from method_samples import LONGER, MEMORY, QUICK, learn_two_tasks

import cps
from cps.methods.expansion.progressive_net import ProgressiveNet
from cps.methods.regularization.separate_heads import SeparateHeads
from samples import conv_net, make_task


def progressive(fabric, kind=ProgressiveNet, **settings):
    torch.manual_seed(0)
    return kind(cps.SmallConvNet(2, widths=(4, 6)), fabric=fabric, **{"train": QUICK, **settings})


def test_it_keeps_the_contract_of_methods(fabric):
    cps.check_method(lambda backbone: ProgressiveNet(backbone, train=QUICK, fabric=fabric))


def test_outputs_of_earlier_tasks_do_not_change_by_a_bit_with_momentum_and_decay(fabric):
    method = progressive(fabric, train=cps.Training(2, cps.SGD(0.1, weight_decay=0.1), batch_size=16))
    images, before = make_task(0).test[0], []
    for index in range(3):
        method.learn(make_task(10 * index))
        outputs = list(method.evidence(images))
        for now, then in zip(outputs, before, strict=False):
            assert torch.equal(now.logits, then.logits)
            assert torch.equal(now.features, then.features)
        before = outputs
    assert all(lateral.expand.weight.abs().max() > 0 for lateral in method.columns.laterals[-1])


def test_a_later_column_reads_the_earlier_ones(fabric):
    method = progressive(fabric)
    for index in range(2):
        method.learn(make_task(10 * index))
    images = make_task(0).test[0]
    _, before = (outputs.logits for outputs in method.evidence(images))
    with torch.no_grad():
        method.columns.columns[0].layers[0].weight += 1
    _, after = (outputs.logits for outputs in method.evidence(images))
    assert not torch.allclose(before, after)


def test_the_first_task_is_finetuning(fabric):
    method, plain = progressive(fabric), progressive(fabric, SeparateHeads)
    for each in (method, plain):
        each.learn(make_task(0))
    own = method.columns.columns[0].state_dict()
    torch.testing.assert_close(own, plain.model.backbone.state_dict(), rtol=0, atol=0)


def test_it_grows_by_a_column_and_its_connections(fabric):
    method = progressive(fabric)
    column = sum(value.nbytes for value in method.backbone.state_dict().values())
    connections = 0
    for earlier in range(3):
        method.learn(make_task(10 * earlier))
        if earlier:  # stages of 4 and 6 channels, reduced to 1
            connections += sum(earlier + earlier * width + width for width in (4, 6))
        heads = 2 * (earlier + 1) * (6 + 1)
        assert method.kept()["weights"] == (earlier + 1) * column + 4 * (connections + heads)


def test_it_learns_without_forgetting(fabric):
    moved, accuracy = learn_two_tasks(progressive(fabric, train=LONGER))
    assert moved == 0
    assert accuracy > 0.8


def test_a_memory_and_unknown_backbones_raise(fabric):
    with pytest.raises(ValueError, match="keeps no images"):
        progressive(fabric, memory=MEMORY)
    with pytest.raises(ValueError, match="pass as stages the names"):
        ProgressiveNet(conv_net(), fabric=fabric)
