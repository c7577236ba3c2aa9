"""Columns: frozen backbones side by side."""

import torch
from torch import nn

from cps.methods.expansion.columns import Columns
from samples import conv_net

IMAGES = torch.randn(8, 2, 6, 6, generator=torch.Generator().manual_seed(0))


def columns(number):
    torch.manual_seed(0)
    backbone = Columns(conv_net())
    for _ in range(number - 1):
        backbone.add()
    return backbone


def test_a_new_column_starts_as_a_copy_of_the_last_one():
    backbone = columns(3).eval()
    parts = backbone(IMAGES).split(12, dim=1)
    assert len(parts) == 3
    assert all(torch.equal(part, parts[0]) for part in parts)
    assert [parameter.requires_grad for parameter in backbone.parameters()] == [False] * 12 + [True] * 6


def test_frozen_columns_do_not_change_by_training_with_momentum_and_decay():
    backbone = columns(2).train()
    before = {name: value.clone() for name, value in backbone.named_buffers()}
    before |= {name: value.detach().clone() for name, value in backbone.named_parameters()}
    trained = [parameter for parameter in backbone.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.1, momentum=0.9, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        backbone(IMAGES).square().sum().backward()
        optimizer.step()
    after = {**dict(backbone.named_parameters()), **dict(backbone.named_buffers())}
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if name.startswith("columns.0.")}
    assert after["columns.0.1.num_batches_tracked"] == 0 < after["columns.1.1.num_batches_tracked"]


def test_weights_that_are_fixed_in_the_backbone_stay_fixed_in_a_new_column():
    first = conv_net()
    first[0].requires_grad_(False)
    backbone = Columns(first)
    backbone.add()
    assert [parameter.requires_grad for parameter in backbone.last.parameters()] == [False] * 2 + [True] * 4
    assert isinstance(backbone.last, nn.Sequential)
