"""Splitting a backbone into a trunk that no task changes and a tail with the subnetworks."""

import pytest
import torch
from torch import nn

import cps
from cps.network import trunk as trunk_module
from cps.network.trunk import Maps, keep_maps, split_backbone, suggest_trunk
from samples import conv_net

PIXELS = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def resnet():
    torch.manual_seed(0)
    return cps.resnet32().eval()


class TwoReaders(nn.Module):
    """A network whose last layer reads the outputs of the first two, so it can only be split behind the first."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))

    def forward(self, images):
        first = self.first(images)
        return self.third(first + self.second(first)).mean(dim=(2, 3))


class Untraceable(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 3)

    def forward(self, images):
        return self.layer(images).mean(dim=(2, 3)) if images.sum() > 0 else images.mean(dim=(2, 3))


@pytest.mark.parametrize("layer", ["0", "1", "2"])
def test_trunk_and_tail_compute_the_bits_of_the_whole_backbone(layer):
    backbone = conv_net(3).eval()
    trunk, tail = split_backbone(backbone, layer)
    assert torch.equal(tail.eval()(trunk(PIXELS)), backbone(PIXELS))


def test_a_trunk_must_leave_weights_for_subnetworks():
    with pytest.raises(ValueError, match="no weights are left"):
        split_backbone(conv_net(3), "3")


def test_a_residual_network_is_split_between_blocks_and_keeps_its_names():
    backbone = resnet()
    layer = suggest_trunk(backbone, PIXELS)
    trunk, tail = split_backbone(backbone, layer)
    assert torch.equal(tail.eval()(trunk(PIXELS)), backbone(PIXELS))
    assert {*dict(trunk.named_parameters()), *dict(tail.named_parameters())} == {*dict(backbone.named_parameters())}


def test_the_suggested_trunk_has_most_of_the_operations():
    costs = {"backbone": resnet(), "trunk": split_backbone(resnet(), suggest_trunk(resnet(), PIXELS)).trunk}
    operations = {}
    for name, module in costs.items():
        with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
            module(PIXELS)
        operations[name] = counter.get_total_flops()
    low, high = trunk_module.TRUNK_SHARES
    assert low <= operations["trunk"] / operations["backbone"] <= high


def test_a_backbone_can_only_be_split_where_one_value_connects_its_parts():
    images = PIXELS
    trunk, tail = split_backbone(TwoReaders(), "first")
    assert tail(trunk(images)).shape == (3, 3)
    with pytest.raises(ValueError, match="cannot be split behind 'second'; it can behind first"):
        split_backbone(TwoReaders(), "second")


def test_unknown_layers_and_untraceable_backbones_are_refused_by_name():
    with pytest.raises(ValueError, match=r"cannot be split behind 'layer9'; it can behind .*blocks"):
        split_backbone(resnet(), "layer9")
    with pytest.raises(ValueError, match=r"torch\.fx cannot trace it"):
        split_backbone(Untraceable(), "layer")
    assert suggest_trunk(Untraceable(), PIXELS) is None


def test_only_the_norm_layers_of_a_tail_keep_their_statistics_in_training():
    tail = split_backbone(resnet(), suggest_trunk(resnet(), PIXELS)).tail
    maps = split_backbone(resnet(), suggest_trunk(resnet(), PIXELS)).trunk(PIXELS)
    whole, before = resnet().train(), {name: value.clone() for name, value in tail.named_buffers()}
    moved = {name: value.clone() for name, value in whole.named_buffers()}
    tail.train()(maps)
    whole(PIXELS)
    assert tail.training
    assert all(torch.equal(value, before[name]) for name, value in tail.named_buffers())
    assert not all(torch.equal(value, moved[name]) for name, value in whole.named_buffers())  # negative control


@pytest.mark.parametrize("kind", [list, iter])
@pytest.mark.parametrize("room", [2**20, 0])
def test_maps_are_computed_once_if_there_is_room_and_again_if_not(monkeypatch, kind, room):
    monkeypatch.setattr(trunk_module, "KEPT_BYTES", room)
    batches = [torch.full((2, 1), float(number)) for number in range(3)]
    computed = []

    class Stream:
        def __iter__(self):
            return iter(batches)

    def compute(batch):
        computed.append(batch)
        return Maps(batch + 1)

    maps = keep_maps(batches if kind is list else Stream(), compute)
    for _ in range(2):
        assert [float(each.values[0]) for each in maps] == [1, 2, 3]
    assert len(computed) == (3 if room else 6)
    if kind is list:
        assert len(maps[:2]) == 2
        assert len(maps[0][torch.tensor([1])]) == 1
