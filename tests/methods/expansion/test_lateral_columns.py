"""Columns with lateral connections: what a column reads, and what stays."""

import pytest
import torch
import torchvision
from torch import nn

import cps
from cps.methods.expansion.lateral_columns import Lateral, LateralColumns
from samples import conv_net

IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def draws():
    return torch.Generator().manual_seed(0)


def make(columns, make_backbone=lambda: cps.SmallConvNet(3, (4, 6)), stages=None, images=IMAGES):
    torch.manual_seed(0)
    backbone = LateralColumns(make_backbone(), stages)
    for _ in range(columns - 1):
        backbone.add(make_backbone(), images, draws())
    return backbone


def connect(backbone):
    """Give all lateral connections random weights."""
    with torch.no_grad():
        for name, value in backbone.named_parameters():
            if "expand" in name:
                value.normal_(generator=draws())
    return backbone.eval()


@pytest.mark.parametrize(
    "make_backbone",
    [lambda: cps.resnet18(3, (4, 4, 8, 8)), cps.resnet32, torchvision.models.resnet18],
    ids=["ResNet-18", "ResNet-32", "torchvision"],
)
def test_new_connections_change_nothing_and_known_backbones_have_one_at_each_of_four_stages(make_backbone):
    backbone = make(2, make_backbone).eval()
    assert [len(each) for each in backbone.laterals] == [0, 4]
    for found, column in zip(backbone.by_column(IMAGES), backbone.columns, strict=True):
        torch.testing.assert_close(found, column(IMAGES), rtol=0, atol=0)
    first, second = connect(backbone).by_column(IMAGES)
    assert torch.equal(first, backbone.columns[0](IMAGES))
    assert not torch.allclose(second, backbone.columns[1](IMAGES))


def test_a_connection_is_as_worked_by_hand():
    """Maps 1 and -2 with the scales 3 and 0.5: V = (1, 1) gives 2, and V = (-1, -1) gives -2, which relu removes."""
    lateral = Lateral(8, 2, draws())
    with torch.no_grad():
        lateral.scales.copy_(torch.tensor([3.0, 0.5]))
        lateral.reduce.weight.zero_()
        lateral.reduce.weight[0, [0, 8]] = 1.0
        lateral.reduce.weight[1, [0, 8]] = -1.0
        lateral.expand.weight.copy_(torch.tensor([[5.0, 7.0]]).expand(8, 2)[:, :, None, None])
    maps = [torch.full((1, 8, 1, 1), value) for value in (1.0, -2.0)]
    torch.testing.assert_close(lateral(maps), torch.full((1, 8, 1, 1), 10.0))


def test_a_column_goes_on_with_the_sum_of_its_map_and_that_of_its_connection():
    backbone = connect(make(3))
    maps = []
    for column, laterals in zip(backbone.columns, backbone.laterals, strict=True):
        signal, own = IMAGES, []
        for layer in column.layers:
            signal = layer(signal)
            if isinstance(layer, nn.ReLU):
                if maps:
                    signal = signal + laterals[len(own)]([each[len(own)] for each in maps])
                own.append(signal)
        maps.append(own)
    assert [len(own) for own in maps] == [2, 2, 2]
    expected = [own[-1].mean(dim=(2, 3)) for own in maps]
    torch.testing.assert_close(backbone.by_column(IMAGES), expected)
    torch.testing.assert_close(backbone(IMAGES), expected[-1])


def test_only_the_last_column_and_its_connections_are_trained():
    backbone = make(3).train()
    assert [column.training for column in backbone.columns] == [False, False, True]
    trained = {name.split(".")[1] for name, value in backbone.named_parameters() if value.requires_grad}
    assert trained == {"2"}
    assert not any(module._forward_hooks for module in backbone.modules())


def test_stages_of_other_backbones_are_named():
    with pytest.raises(ValueError, match="stages of a backbone of type Sequential are not known"):
        LateralColumns(conv_net())
    images = IMAGES[:, :2, :6, :6]
    assert make(2, conv_net, ("2", "4"), images)(images).shape == (4, 12)
