"""Columns with lateral connections: backbones of which each reads the maps of all earlier ones, too."""

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, fx, nn

from cps.network.backbones import ResNet, SmallConvNet
from cps.runtime.text import shorten_names

REDUCTION = 4  # of the channels between the two convolutions of a lateral connection


class Lateral(nn.Module):
    """What a column adds to its map of a stage: `U relu(V (s_1 h_1, ..., s_k h_k))` for the maps h of earlier columns.

    U and V are convolutions of single pixels and s are numbers, all of which are learned. U starts at 0, so that a new
    column begins alone.
    """

    def __init__(self, channels: int, columns: int, draws: torch.Generator):
        super().__init__()
        hidden = max(channels // REDUCTION, 1)
        self.scales = nn.Parameter(torch.ones(columns))
        self.reduce = nn.Conv2d(columns * channels, hidden, 1, bias=False)
        self.expand = nn.Conv2d(hidden, channels, 1, bias=False)
        nn.init.kaiming_normal_(self.reduce.weight, nonlinearity="relu", generator=draws)
        nn.init.zeros_(self.expand.weight)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Return the sum for the maps (N, channels, height, width) of earlier columns."""
        scaled = torch.cat([scale * each for scale, each in zip(self.scales, maps, strict=True)], dim=1)
        return self.expand(self.reduce(scaled).relu())


class LateralColumns(nn.Module):
    """Backbones with lateral connections at the ends of their stages: images -> features (N, d) of the last one.

    `stages` are the names of modules that are called once, None for those of a known backbone. All columns but the last
    are frozen: they get no gradients and stay in evaluation mode.
    """

    def __init__(self, first: nn.Module, stages: Sequence[str] | None = None):
        super().__init__()
        self.stages = tuple(stages or find_stages(first))
        self.columns, self.laterals = nn.ModuleList([first]), nn.ModuleList([nn.ModuleList()])

    @torch.no_grad()
    def add(self, column: nn.Module, pixels: Tensor, draws: torch.Generator) -> None:
        """Freeze all columns, and add one to be trained; any pixels tell the numbers of channels."""
        maps: list[list[Tensor]] = [[] for _ in self.stages]
        self._run(self.columns[0].eval(), self.laterals[0], pixels, maps)
        earlier = len(self.columns)
        self.requires_grad_(False)
        self.columns.append(column)
        self.laterals.append(nn.ModuleList(Lateral(each[0].shape[1], earlier, draws) for each in maps))
        self.to(pixels.device).train(self.training)

    def train(self, mode: bool = True) -> "LateralColumns":
        """Set the mode of the last column."""
        super().train(mode)
        for column in self.columns[:-1]:
            column.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        """Return the features (N, d) of the last column."""
        return self.by_column(images)[-1]

    def by_column(self, images: Tensor) -> list[Tensor]:
        """Return the features (N, d) of each column."""
        maps: list[list[Tensor]] = [[] for _ in self.stages]
        with torch.no_grad():
            frozen = zip(self.columns[:-1], self.laterals[:-1], strict=True)
            features = [self._run(column, laterals, images, maps) for column, laterals in frozen]
        return [*features, self._run(self.columns[-1], self.laterals[-1], images, maps)]

    def _run(self, column: nn.Module, laterals: nn.Module, images: Tensor, maps: list[list[Tensor]]) -> Tensor:
        """Return the features of a column, and add its maps to those of each stage."""

        def connect(stage: int, output: Tensor) -> Tensor:
            if maps[stage]:
                output = output + laterals.get_submodule(str(stage))(maps[stage])
            maps[stage].append(output)
            return output

        with ExitStack() as handles:
            for stage, name in enumerate(self.stages):

                def hook(module: nn.Module, inputs: object, output: Tensor, stage: int = stage) -> Tensor:
                    return connect(stage, output)

                handles.callback(column.get_submodule(name).register_forward_hook(hook).remove)
            return column(images)


def find_stages(backbone: nn.Module) -> tuple[str, ...]:
    """Return the names of the modules that end the stages of a builtin backbone or of a ResNet of torchvision."""
    if isinstance(backbone, ResNet):
        return tuple(f"blocks.{index}" for index in backbone.stage_ends)
    if isinstance(backbone, SmallConvNet):
        return tuple(f"layers.{index}" for index, layer in enumerate(backbone.layers) if isinstance(layer, nn.ReLU))
    names = tuple(name for name in ("layer1", "layer2", "layer3", "layer4") if hasattr(backbone, name))
    if names and not isinstance(backbone, fx.GraphModule):  # which calls the modules inside these
        return names
    modules = shorten_names([name for name, _ in backbone.named_children()])
    raise ValueError(
        f"the stages of a backbone of type {type(backbone).__name__} are not known; pass as stages the names of the "
        f"modules whose maps later columns read; its modules are {modules}"
    )
