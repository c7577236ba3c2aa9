"""EfficientNet-Lite0 (Tan and Le, 2019; the Lite networks have no squeeze-and-excitation, and ReLU6 everywhere).

Small and fast on a CPU: 3.4 million weights without the head, 0.4 billion multiplications for an image of 224 pixels.
"""

import math

from torch import Tensor, nn

STAGES = (  # widening of each block, channels, blocks, stride of the first, side of the depthwise kernel
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)
STEM, FEATURES = 32, 1280


class EfficientNetLite0(nn.Module):
    """EfficientNet-Lite0 without its classification head: images -> 1,280 features.

    Sides of images must be multiples of 32 pixels for the padding of the published weights.
    """

    def __init__(self, channels: int = 3):
        super().__init__()
        self.stem = nn.Sequential(*_conv(channels, STEM, 3, stride=2), nn.ReLU6(inplace=True))
        blocks, width = [], STEM
        for widening, channels_out, number, stride, kernel in STAGES:
            for index in range(number):
                blocks.append(_Block(width, channels_out, widening, kernel, stride if index == 0 else 1))
                width = channels_out
        self.blocks = nn.Sequential(*blocks)
        self.last = nn.Sequential(*_conv(width, FEATURES, 1), nn.ReLU6(inplace=True))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels // module.groups
                nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))

    def forward(self, images: Tensor) -> Tensor:
        """Return features, shape (N, 1280)."""
        return self.last(self.blocks(self.stem(images))).mean(dim=(2, 3))


class _Block(nn.Module):
    """An inverted residual: widen, convolve each channel alone, narrow. A shortcut where the shape stays."""

    def __init__(self, width_in: int, width_out: int, widening: int, kernel: int, stride: int):
        super().__init__()
        width = width_in * widening
        layers: list[nn.Module] = []
        if widening > 1:
            layers += [*_conv(width_in, width, 1), nn.ReLU6(inplace=True)]
        layers += [*_conv(width, width, kernel, stride=stride, groups=width), nn.ReLU6(inplace=True)]
        self.layers = nn.Sequential(*layers, *_conv(width, width_out, 1))
        self.has_shortcut = stride == 1 and width_in == width_out

    def forward(self, signal: Tensor) -> Tensor:
        branch = self.layers(signal)
        return signal + branch if self.has_shortcut else branch


def _conv(width_in: int, width_out: int, kernel: int, *, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """Return a convolution with batch norm. With stride 2, TensorFlow pads one pixel more at the right and bottom."""
    before = (kernel - stride) // 2 if stride == 2 else kernel // 2
    after = kernel - stride - before
    pad = [nn.ZeroPad2d((before, after, before, after))] if stride == 2 else []
    padding = 0 if stride == 2 else before
    conv = nn.Conv2d(width_in, width_out, kernel, stride=stride, padding=padding, groups=groups, bias=False)
    return [*pad, conv, nn.BatchNorm2d(width_out, eps=1e-3, momentum=0.01)]
