"""Builtin backbones: the networks of the paper, and small ones for small images and for CPUs. Images -> features.

Any `nn.Module` made of convolutions, linear and norm layers works as well.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from cps.network.efficientnet import EfficientNetLite0

STAGES = 4  # maps of a residual network that are compared


class SmallConvNet(nn.Module):
    """Three convolutions with batch norm, for small images such as 8x8 digits: images -> `widths[-1]` features."""

    def __init__(self, channels: int = 1, widths: Sequence[int] = (32, 64, 64)):
        super().__init__()
        layers: list[nn.Module] = []
        for index, width in enumerate(widths):
            layers += [
                nn.Conv2d(channels, width, 3, stride=1 if index == 0 else 2, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
            ]
            channels = width
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        """Return features, shape (N, widths[-1])."""
        return self.layers(images).mean(dim=(2, 3))


class Block(nn.Module):
    """Two convolutions and a shortcut, which is a convolution or padding where the shape changes."""

    def __init__(self, channels: int, width: int, stride: int, *, shortcut: nn.Module, last_relu: bool):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut = shortcut
        self.last_relu = last_relu

    def forward(self, signal: Tensor) -> Tensor:
        """Return the block's output."""
        return self.activate(self.total(signal))

    def total(self, signal: Tensor) -> Tensor:
        """Return the sum of the branch and the shortcut."""
        branch = F.relu(self.norm1(self.conv1(signal)))
        return self.norm2(self.conv2(branch)) + self.shortcut(signal)

    def activate(self, total: Tensor) -> Tensor:
        """Return the block's output for the sum of the branch and the shortcut."""
        return F.relu(total) if self.last_relu else total


class PadShortcut(nn.Module):
    """A shortcut without parameters: every second pixel, with zeros for the missing channels."""

    def __init__(self, missing: int):
        super().__init__()
        self.missing = missing

    def forward(self, signal: Tensor) -> Tensor:
        """Return the signal at half its size, with `missing` more channels."""
        before = self.missing // 2
        return F.pad(signal[:, :, ::2, ::2], (0, 0, 0, 0, before, self.missing - before))


class ResNet(nn.Module):
    """A residual network for small images: a 3x3 stem, groups of blocks, average pooling.

    The first group of blocks keeps the size of the stem's output, and each later one halves it.
    """

    def __init__(
        self,
        channels: int,
        widths: Sequence[int],
        blocks: int,
        *,
        shortcuts: Literal["convolution", "padding"],
        last_relu: bool,
        fan: Literal["fan_in", "fan_out"],
        stem_stride: int = 1,
    ):
        super().__init__()
        self.stem = nn.Conv2d(channels, widths[0], 3, stride=stem_stride, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(widths[0])
        groups = []
        width_in = widths[0]
        for index, width in enumerate(widths):
            for block in range(blocks):
                stride = 2 if index > 0 and block == 0 else 1
                shortcut: nn.Module = nn.Identity()
                changes = stride != 1 or width_in != width
                if changes and shortcuts == "convolution":
                    shortcut = nn.Sequential(
                        nn.Conv2d(width_in, width, 1, stride=stride, bias=False), nn.BatchNorm2d(width)
                    )
                elif changes:
                    shortcut = PadShortcut(width - width_in)
                groups.append(Block(width_in, width, stride, shortcut=shortcut, last_relu=last_relu))
                width_in = width
        self.blocks = nn.Sequential(*groups)
        ends = {blocks * (index + 1) - 1 for index in range(len(widths))}
        self.stage_ends = sorted(ends if len(ends) >= STAGES else ends | {len(groups) - 2})
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode=fan, nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Return features, shape (N, widths[-1])."""
        signal = F.relu(self.norm(self.stem(images)))
        return self.blocks(signal).mean(dim=(2, 3))

    def forward_maps(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return features, and the maps (N, channels, height, width) at the ends of the stages, before their last ReLU.

        A network with three stages has a fourth map, that of the block before the last, as in PODNet's ResNet-32.
        """
        signal, maps = F.relu(self.norm(self.stem(images))), []
        for index, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            total = block.total(signal)
            signal = block.activate(total)
            if index in self.stage_ends:
                maps.append(total)
        return signal.mean(dim=(2, 3)), maps


def resnet18(channels: int = 3, widths: Sequence[int] = (64, 128, 256, 512)) -> ResNet:
    """Return a ResNet-18 for small images; widths (21, 42, 85, 170) are the paper's ResNet-18(1/3)."""
    return ResNet(channels, widths, 2, shortcuts="convolution", last_relu=True, fan="fan_in")


def resnet32(channels: int = 3) -> ResNet:
    """Return the paper's ResNet-32: widths 16, 32, 64, shortcuts without parameters, no ReLU after additions."""
    return ResNet(channels, (16, 32, 64), 5, shortcuts="padding", last_relu=False, fan="fan_out")


def resnet8(channels: int = 3) -> ResNet:
    """Return a ResNet-8 for CPUs: widths 32, 64 and 128, one block each, behind a stem that halves the image."""
    return ResNet(channels, (32, 64, 128), 1, shortcuts="convolution", last_relu=True, fan="fan_in", stem_stride=2)


def large_resnet18(channels: int = 3) -> nn.Module:
    """Return torchvision's ResNet-18 without its head, for images of 64 pixels and more: a 7x7 stem and pooling."""
    from torchvision.models import resnet18 as torchvision_resnet18

    backbone = torchvision_resnet18()
    backbone.fc = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
    if channels != 3:
        backbone.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    return backbone


def resnet18_third(channels: int = 3) -> ResNet:
    """Return the paper's ResNet-18(1/3) for small images."""
    return resnet18(channels, (21, 42, 85, 170))


def remove_last_relu(backbone: nn.Module) -> None:
    """Remove the last ReLU of a builtin ResNet or `SmallConvNet`, so that features have both signs.

    Other backbones stay as they are.
    """
    if isinstance(backbone, ResNet):
        last = backbone.blocks[-1]
        assert isinstance(last, Block)
        last.last_relu = False
    if isinstance(backbone, SmallConvNet):
        backbone.layers[-1] = nn.Identity()


BUILTINS: dict[str, Callable[[int], nn.Module]] = {
    "small": SmallConvNet,
    "resnet18-third": resnet18_third,
    "resnet18": resnet18,
    "resnet18-large": large_resnet18,
    "resnet32": resnet32,
    "resnet8": resnet8,
    "efficientnet-lite0": EfficientNetLite0,
}
