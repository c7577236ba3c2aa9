"""Intermediate maps of backbones: what distillation compares inside a network."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from cps.network.backbones import SmallConvNet
from cps.runtime.text import shorten_names

ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU)


def features_and_maps(
    backbone: nn.Module, images: Tensor, stages: Sequence[str] | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Return features (N, d), and the maps (N, channels, height, width) of the stages of a backbone.

    `stages` are names of modules. The map of an activation is its input, that of another module its output, both of its
    last call. Without names, a backbone with a method `forward_maps(images) -> (features, maps)` returns its own maps;
    those of `SmallConvNet` and of torchvision's ResNets are taken before the last ReLU of each stage.
    """
    if stages is None and hasattr(backbone, "forward_maps"):
        features, maps = backbone.forward_maps(images)  # pyright: ignore[reportCallIssue]
        return features, list(maps)
    names = find_stages(backbone) if stages is None else stages
    with _recorded(backbone, names) as recorded:
        features = backbone(images)
    for name in names:
        if name not in recorded:
            raise ValueError(f"the backbone does not call its module '{name}', so it has no map; name another stage")
        if recorded[name].ndim != 4:
            shape = tuple(recorded[name].shape)
            raise ValueError(f"the map of '{name}' must have shape (N, channels, height, width), got {shape}")
    return features, [recorded[name] for name in names]


def check_stages(backbone: nn.Module, stages: Sequence[str] | None) -> None:
    """Raise `ValueError` if the stages of a backbone cannot be found."""
    if stages is None:
        if not hasattr(backbone, "forward_maps"):
            find_stages(backbone)
        return
    modules = dict(backbone.named_modules())
    for name in stages:
        if name not in modules or not name:
            raise ValueError(f"the backbone has no module '{name}'; its modules are {_examples(backbone)}")
    if not stages:
        raise ValueError("stages must name at least one module of the backbone")


def find_stages(backbone: nn.Module) -> tuple[str, ...]:
    """Return the names of the modules that end the stages of `SmallConvNet`, a ResNet of torchvision or its tail."""
    if isinstance(backbone, SmallConvNet):
        layers = enumerate(backbone.layers)
        return tuple(f"layers.{index}" for index, layer in layers if isinstance(layer, nn.BatchNorm2d))
    ends = []
    for stage in ("layer1", "layer2", "layer3", "layer4"):
        blocks = list(getattr(backbone, stage, nn.Identity()).named_children())
        if blocks and hasattr(blocks[-1][1], "relu"):
            ends.append(f"{stage}.{blocks[-1][0]}.relu")
    if ends:
        return tuple(ends)
    raise ValueError(
        f"the stages of a backbone of type {type(backbone).__name__} are not known; pass as stages the names of the "
        f"modules whose maps are compared; its modules are {_examples(backbone)}"
    )


@contextmanager
def _recorded(backbone: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Record the maps of modules that are called inside the block.

    The network goes on with a copy, since a ReLU may overwrite its input.
    """
    recorded: dict[str, Tensor] = {}

    def record(module: nn.Module, name: str) -> Any:
        def input_of(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            recorded[name] = inputs[0]
            return (inputs[0].clone(), *inputs[1:])

        def output_of(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            recorded[name] = output
            return output.clone()

        if isinstance(module, ACTIVATIONS):
            return module.register_forward_pre_hook(input_of)
        return module.register_forward_hook(output_of)

    handles = [record(backbone.get_submodule(name), name) for name in names]
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


def _examples(backbone: nn.Module) -> str:
    """Return names of modules that may be stages."""
    return shorten_names([name for name, _ in backbone.named_children()])
