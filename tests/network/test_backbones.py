"""The builtin backbones."""

import pytest
import torch
import torchvision

import cps


def test_an_unknown_builtin_backbone_raises():
    with pytest.raises(ValueError, match="unknown backbone 'os.system'; choose from: small"):
        cps.Architecture("os.system")


def test_a_resnet_may_have_equal_widths():
    assert cps.resnet18(3, (16, 16, 16, 16))(torch.zeros(2, 3, 16, 16)).shape == (2, 16)


@pytest.mark.parametrize(
    ("make", "weights", "kernels"),
    [
        (lambda: cps.resnet18(3, (21, 42, 85, 170)), 1_228_466, 153_298),
        (torchvision.models.resnet18, 11_166_912, 1_392_832),
        (cps.resnet32, 461_232, 51_248),
    ],
    ids=["ResNet-18(1/3)", "ResNet-18", "ResNet-32"],
)
def test_the_networks_of_the_paper_have_their_published_sizes(make, weights, kernels):
    convolutions = [p for p in make().parameters() if p.ndim == 4]
    assert sum(p.numel() for p in convolutions) == weights
    assert sum(p.shape[0] * p.shape[1] for p in convolutions) == kernels
