"""Attention maps of Grad-CAM."""

import pytest
import torch
from torch import nn

from cps.methods.regularization.attention import attention_distance, attention_maps, last_maps, recorded_maps
from cps.network.backbones import SmallConvNet, large_resnet18, resnet32
from samples import conv_net

IMAGES = torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(0))


class Pooled(nn.Module):
    """A network whose features are the means of its maps."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, images):
        return self.network(images).mean(dim=(2, 3))


def test_the_map_of_two_channels_is_as_worked_by_hand():
    """The score is 3 times the mean of channel 0 minus the mean of channel 1: a = (3/4, -1/4) for four pixels."""
    maps = torch.tensor([[[[1.0, 0.0], [2.0, 0.0]], [[0.0, 4.0], [2.0, 0.0]]]], requires_grad=True)
    scores = 3 * maps[:, 0].mean(dim=(1, 2)) - maps[:, 1].mean(dim=(1, 2))
    expected = torch.tensor([0.75, 0.0, 1.0, 0.0])  # the second pixel is below zero
    torch.testing.assert_close(attention_maps(scores, maps)[0], expected / expected.norm())


def test_scaling_the_maps_of_an_image_changes_nothing_and_each_row_has_its_own_score():
    torch.manual_seed(0)
    weights, values = torch.rand(5, 3), torch.rand(4, 5, 3, 3, requires_grad=True)
    classes = torch.tensor([0, 2, 1, 2])

    def of(maps):
        return attention_maps((maps.mean(dim=(2, 3)) @ weights).gather(1, classes[:, None])[:, 0], maps)

    together = of(values)
    torch.testing.assert_close(of((7 * values).detach().requires_grad_()), together)
    for row in range(4):
        alone = values[row : row + 1].detach().requires_grad_()
        score = (alone.mean(dim=(2, 3)) @ weights)[:, classes[row]]
        torch.testing.assert_close(attention_maps(score, alone), together[row : row + 1])


def test_the_distance_is_the_sum_of_absolute_differences_averaged_over_images():
    first, second = torch.tensor([[1.0, 0.0], [0.6, 0.8]]), torch.tensor([[0.0, 1.0], [0.6, 0.8]])
    assert attention_distance(first, second).item() == pytest.approx(1)
    assert attention_distance(first, first).item() == 0


def test_a_map_without_positive_pixels_has_finite_gradients():
    maps = torch.zeros(1, 2, 2, 2, requires_grad=True)
    attention_maps(maps.sum(dim=(1, 2, 3)), maps, create_graph=True).sum().backward()
    assert maps.grad.isfinite().all()


@pytest.mark.parametrize(
    ("backbone", "shape", "expected"),
    [
        (conv_net(), (2, 6, 6), "4"),
        (SmallConvNet(2), (2, 8, 8), "layers"),
        (resnet32(2), (2, 8, 8), "blocks"),
        (large_resnet18(2), (2, 64, 64), "layer4"),
    ],
)
def test_the_last_maps_are_those_that_are_pooled(backbone, shape, expected):
    backbone.eval()
    images = torch.randn(2, *shape)
    name = last_maps(backbone, images)
    assert name == expected
    with recorded_maps(backbone, name) as maps:
        features = backbone(images)
    torch.testing.assert_close(maps[0].mean(dim=(2, 3)), features)


def test_a_backbone_without_maps_raises():
    with pytest.raises(ValueError, match="need a backbone with convolutions"):
        last_maps(nn.Sequential(nn.Flatten(), nn.Linear(72, 4)), IMAGES)


def test_maps_of_a_network_that_is_not_trained_can_require_gradients():
    backbone = conv_net().requires_grad_(False).eval()
    with recorded_maps(backbone, "4", detached=True) as maps:
        features = backbone(IMAGES)
    assert attention_maps(features[:, 0], maps[0]).shape == (4, 9)
    assert not backbone(IMAGES).requires_grad  # the hook is gone
