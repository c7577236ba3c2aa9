"""Maps of the stages of backbones."""

import pytest
import torch
import torchvision
from torch import nn

import cps
from cps.methods.cosine.stage_maps import check_stages, features_and_maps
from cps.network.backbones import remove_last_relu
from cps.network.trunk import split_backbone
from samples import conv_net


def images(size, channels=3):
    return torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("make", "size", "shapes"),
    [
        (lambda: cps.resnet18(3, (4, 5, 6, 7)), 16, [(4, 16), (5, 8), (6, 4), (7, 2)]),
        (cps.resnet32, 8, [(16, 8), (32, 4), (64, 2), (64, 2)]),
        (lambda: cps.SmallConvNet(3, widths=(4, 6)), 8, [(4, 8), (6, 4)]),
        (torchvision.models.resnet18, 32, [(64, 8), (128, 4), (256, 2), (512, 1)]),
    ],
    ids=["ResNet-18", "ResNet-32", "SmallConvNet", "torchvision"],
)
def test_known_backbones_give_a_map_of_each_stage_before_its_last_relu(make, size, shapes):
    torch.manual_seed(0)
    backbone = make().eval()
    check_stages(backbone, None)
    expected = backbone(images(size))
    features, maps = features_and_maps(backbone, images(size))
    assert torch.equal(features, expected)
    assert [tuple(each.shape) for each in maps] == [(2, channels, side, side) for channels, side in shapes]
    assert all(each.min() < 0 for each in maps)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in backbone.modules())
    gradients = torch.autograd.grad(features.sum(), maps)  # the maps are those that the features come from
    assert all(gradient.abs().sum() > 0 for gradient in gradients)


def test_the_last_map_of_a_builtin_resnet_gives_the_features():
    backbone = cps.resnet18(3, (4, 5, 6, 7)).eval()
    features, maps = features_and_maps(backbone, images(16))
    torch.testing.assert_close(features, maps[-1].relu().mean(dim=(2, 3)))


@pytest.mark.parametrize("make", [lambda: cps.resnet18(3, (4, 5, 6, 7)), lambda: cps.SmallConvNet(3, (4, 6))])
def test_without_the_last_relu_features_are_the_mean_of_the_last_map(make):
    torch.manual_seed(0)
    backbone = make().eval()
    assert backbone(images(16)).min() >= 0
    remove_last_relu(backbone)
    features, maps = features_and_maps(backbone, images(16))
    assert features.min() < 0
    torch.testing.assert_close(features, maps[-1].mean(dim=(2, 3)))


def test_what_follows_a_trunk_has_the_stages_that_are_left():
    torch.manual_seed(0)
    whole = torchvision.models.resnet18().eval()
    trunk, tail = split_backbone(whole, "layer2")
    _, expected = features_and_maps(whole, images(32))
    _, maps = features_and_maps(tail.eval(), trunk(images(32)))
    torch.testing.assert_close(maps, expected[2:])


def test_stages_of_other_backbones_are_named_and_an_activation_stands_for_its_input():
    backbone = conv_net(3).eval()
    _, (before, after) = features_and_maps(backbone, images(6), ("4", "1"))
    convolved = backbone[3](backbone[2](backbone[1](backbone[0](images(6)))))
    torch.testing.assert_close(before, convolved)
    torch.testing.assert_close(after, backbone[1](backbone[0](images(6))))


@pytest.mark.parametrize(
    ("stages", "match"),
    [
        (None, "stages of a backbone of type Sequential are not known; pass as stages .* its modules are .'0', '1'"),
        (("1", "nine"), "has no module 'nine'"),
        ((), "at least one"),
    ],
)
def test_unknown_stages_raise(stages, match):
    with pytest.raises(ValueError, match=match):
        check_stages(conv_net(), stages)


def test_modules_without_a_map_raise():
    with pytest.raises(ValueError, match="map of '6' must have shape"):
        features_and_maps(conv_net(3), images(6), ("6",))

    class Idle(nn.Sequential):
        def forward(self, value):
            return self[0](value)

    with pytest.raises(ValueError, match="does not call its module '1'"):
        features_and_maps(Idle(conv_net(3), nn.ReLU()), images(6), ("1",))
