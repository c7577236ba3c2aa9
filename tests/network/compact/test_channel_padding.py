"""A padded backbone computes and trains the same, and its padding stays zero."""

import pytest
import torch
from torch import nn

import cps
from cps.network.classifier import Classifier
from cps.network.compact.channel_padding import copy_into, pad_channels, resize_optimizer_state
from samples import conv_net


def train(model, steps, pixels, labels):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-2)
    model.train()
    for _ in range(steps):
        nn.functional.cross_entropy(model(pixels), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def test_a_padded_copy_trains_as_the_backbone_does_and_its_padding_stays_zero():
    torch.manual_seed(0)
    backbone = cps.resnet18(3, (18, 21, 25, 30)).double()
    pixels, labels = torch.randn(8, 3, 8, 8).double(), torch.arange(8) % 2
    padded = pad_channels(backbone, pixels, min_channels=1)
    assert padded is not None
    assert {m.out_channels for m in padded.modules() if isinstance(m, nn.Conv2d)} == {24, 32}
    assert {m.in_channels for m in padded.modules() if isinstance(m, nn.Conv2d)} == {8, 24, 32}
    head = nn.Linear(30, 2).double()
    plain, wide = Classifier(backbone, head), Classifier(padded, nn.Linear(30, 2).double())
    wide.head.load_state_dict(head.state_dict())
    first, second = train(plain, 3, pixels, labels), train(wide, 3, pixels, labels)
    torch.testing.assert_close(wide.eval()(pixels), plain.eval()(pixels))
    trained = {name: value.clone() for name, value in backbone.named_parameters()}
    shapes = {name: value.shape for name, value in backbone.named_parameters()}
    for name, value in padded.inner.named_parameters():
        padding = value.detach().clone()
        padding[tuple(map(slice, shapes[name]))] = 0
        assert not padding.any(), name
    copy_into(padded.inner, backbone)
    for name, value in backbone.named_parameters():
        torch.testing.assert_close(value, trained[name])
    state = resize_optimizer_state(second.state_dict(), plain)
    for index, entries in first.state_dict()["state"].items():
        torch.testing.assert_close(state["state"][index], entries)
    back = resize_optimizer_state(state, wide)["state"]
    assert all(torch.equal(v, second.state_dict()["state"][i][k]) for i, e in back.items() for k, v in e.items())


@pytest.mark.parametrize(
    "backbone",
    [cps.resnet32(3), conv_net(3), nn.Sequential(nn.Conv2d(3, 17, 3), nn.Flatten(), nn.Linear(17 * 36, 4))],
    ids=["nothing to pad", "few channels", "a layer that cannot be padded"],
)
def test_a_backbone_that_need_not_or_cannot_be_padded_is_not(backbone):
    assert pad_channels(backbone, torch.randn(2, 3, 8, 8)) is None


def test_a_backbone_that_uses_its_number_of_channels_is_not_padded():
    class UsesShape(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 17, 3), nn.Conv2d(17, 18, 3)

        def forward(self, x):
            signal = self.first(x)
            return (self.second(signal) * signal.shape[1]).mean(dim=(2, 3))

    assert pad_channels(UsesShape(), torch.randn(2, 3, 8, 8)) is None
