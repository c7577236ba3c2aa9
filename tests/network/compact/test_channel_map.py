"""Groups of channels that layers read and write."""

import pytest
import torch
from torch import nn

from cps.network.backbones import resnet18
from cps.network.compact.channel_map import map_channels
from samples import conv_net


def test_a_chain_of_layers_reads_what_the_one_before_wrote():
    channels = map_channels(conv_net(), torch.randn(2, 2, 6, 6))
    (images, first), (again, second) = (channels.layers[name] for name in ("0.weight", "3.weight"))
    assert first == again
    assert channels.features == second
    assert images not in channels.sizes
    assert channels.sizes == {first: 8, second: 12}
    assert {name: group for name, group in channels.private.items() if name.startswith("1.")} == {
        f"1.{name}": first for name in ("weight", "bias", "running_mean", "running_var")
    }
    assert channels.private["3.bias"] == second


def test_what_is_added_is_one_group():
    channels = map_channels(resnet18(3, (4, 5, 6, 7)), torch.randn(2, 3, 8, 8))
    written = {name: target for name, (_, target) in channels.layers.items()}
    assert written["stem.weight"] == written["blocks.0.conv2.weight"] == written["blocks.1.conv2.weight"]
    assert written["blocks.2.conv2.weight"] == written["blocks.2.shortcut.0.weight"]
    assert written["blocks.0.conv1.weight"] != written["stem.weight"]
    assert channels.features == written["blocks.7.conv2.weight"]
    assert sorted(channels.sizes.values()) == [4, 4, 4, 5, 5, 5, 6, 6, 6, 7, 7, 7]


def test_a_layer_whose_channels_are_not_known_is_named():
    backbone = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(ValueError, match="the channels of '0.weight' are not known"):
        map_channels(backbone, torch.randn(2, 4, 6, 6))
