"""Small backbones of many kinds for the tests."""

import pytest
import torch
import torchvision
from torch import nn

import cps
from samples import conv_net


class VisionTransformer(nn.Module):
    """A small transformer with plain linear layers: patches, two blocks, a class token."""

    def __init__(self, dim=16, tokens=4):
        super().__init__()
        self.patches = nn.Conv2d(2, dim, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, dim))
        self.places = nn.Parameter(0.02 * torch.randn(1, tokens + 1, dim))
        self.blocks = nn.ModuleList([TransformerBlock(dim) for _ in range(2)])
        self.norm = nn.LayerNorm(dim)

    def forward(self, images):
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(tokens), -1, -1), tokens], dim=1) + self.places
        for block in self.blocks:
            tokens = block(tokens)
        return self.norm(tokens)[:, 0]


class TransformerBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * dim, dim))

    def forward(self, x):
        y = self.norm1(x)
        attention = torch.softmax(self.query(y) @ self.key(y).transpose(1, 2) / 4, dim=-1)
        x = x + self.out(attention @ self.value(y))
        return x + self.mlp(self.norm2(x))


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 16), nn.LayerNorm(16))


def torchvision_resnet18():
    module = torchvision.models.resnet18()
    module.conv1 = nn.Conv2d(2, 64, 3, padding=1, bias=False)
    module.fc = nn.Identity()
    return module


def mobilenet():
    module = torchvision.models.mobilenet_v3_small()
    module.features[0][0] = nn.Conv2d(2, 16, 3, stride=2, padding=1, bias=False)
    return module


def torch_transformer():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches = nn.Conv2d(2, 16, 4, stride=4)
            self.encoder = layer

        def forward(self, images):
            return self.encoder(self.patches(images).flatten(2).transpose(1, 2)).mean(dim=1)

    return Encoder()


BACKBONES = {
    "mlp": mlp,
    "plain cnn with biases": conv_net,
    "resnet18(1/3)": lambda: cps.resnet18(2, widths=(4, 8, 12, 16)),
    "resnet32": lambda: cps.resnet32(2),
    "torchvision resnet18": torchvision_resnet18,
    "mobilenet_v3_small": mobilenet,
    "vision transformer": VisionTransformer,
    "torch's transformer": torch_transformer,
}
LARGE = {"torchvision resnet18", "mobilenet_v3_small"}
BACKBONE_NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in LARGE else name for name in BACKBONES]
