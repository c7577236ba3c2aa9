"""Which channels the layers of a backbone read and write: its neurons, and the connections between them."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cps.network.compact.extraction import ChannelGroups
from cps.network.compact.fx_tracing import record_shapes, trace_module
from cps.network.partition import partition


@dataclass(frozen=True)
class ChannelMap:
    """Groups of channels, by name. Values that are added or multiplied carry the same group.

    `layers` has the group that the weight of each layer reads and the one that it writes. `private` has the group of
    each bias and of each parameter and statistic of a norm layer, one number for each channel. `sizes` has the number
    of channels of the groups that a layer writes; others are the images, or what an unknown operation made of channels.
    `features` is the group of the features.
    """

    layers: dict[str, tuple[str, str]]
    private: dict[str, str]
    sizes: dict[str, int]
    features: str


@torch.no_grad()
def map_channels(backbone: nn.Module, pixels: Tensor) -> ChannelMap:
    """Return the channels of a backbone that processes these pixels; raise `ValueError` if they cannot be found."""
    graph = trace_module(copy.deepcopy(backbone).eval())
    record_shapes(graph, pixels)
    groups = ChannelGroups(graph)
    layers, private, sizes = {}, {}, {}
    readers = {node for node, _ in groups.readers}
    for node in graph.graph.nodes:
        layer = graph.get_submodule(str(node.target)) if node.op == "call_module" else None
        group = groups.find_root(node).name
        if node in readers:
            weight: Tensor = layer.weight  # pyright: ignore
            layers[f"{node.target}.weight"] = groups.find_root(node.all_input_nodes[0]).name, group
            sizes[group] = len(weight)
        if isinstance(layer, nn.Conv2d | nn.Linear | nn.BatchNorm2d):
            own = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
            private |= {f"{node.target}.{name}": group for name, value in own.items() if value.ndim == 1}
    for name in partition(backbone).shared:
        if name not in layers:
            raise ValueError(f"the channels of '{name}' are not known; use a backbone of plain convolutions and layers")
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    return ChannelMap(layers, private, sizes, groups.find_root(output.all_input_nodes[0]).name)
