"""Split a pretrained backbone into a trunk and a tail.

The trunk, the first layers, stays as it came and belongs to no task: it runs once for an image, whatever the number of
subnetworks. Subnetworks live in the tail. The outputs of the trunk are called maps.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from cps.network.compact.fx_tracing import trace_module
from cps.runtime.text import first_line

KEPT_BYTES = 2**29  # of maps of the images of one prediction, so that the trunk runs once for each
TRUNK_SHARES = 0.65, 0.85  # of the operations of a backbone: the least and the most for a suggested trunk


class Tail(fx.GraphModule):
    """What follows a trunk. Its batch norm layers keep their statistics: few photos of a task give no better ones."""

    def train(self, mode: bool = True) -> "Tail":
        """Set training mode, but not for batch norm layers."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
        return self


class Split(NamedTuple):
    """The two parts of a backbone; the names of their tensors are those in the backbone."""

    trunk: nn.Module
    tail: nn.Module


@dataclass(frozen=True, eq=False)
class Maps:
    """The outputs of the trunk for a batch of images: an input of the network that has passed the trunk already."""

    values: Tensor

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, indices: Tensor | slice) -> "Maps":
        return Maps(self.values[indices])


def split_backbone(backbone: nn.Module, layer: str) -> Split:
    """Split a backbone behind a layer, such as "layer3": copies, of which the trunk is frozen and in eval mode.

    Raise `ValueError` if the backbone cannot be traced, or if its later layers read more than the output of that one.
    """
    graph = _traced(backbone)
    cuts = _cuts(graph)
    if layer not in cuts:
        nearest = get_close_matches(layer, cuts, n=3) or list(cuts)[-3:]
        where = f"it can behind {' or '.join(nearest)}" if cuts else "nor behind any other layer"
        raise ValueError(f"the backbone cannot be split behind '{layer}'; {where}")
    trunk, tail = _trunk(graph, cuts[layer]), Tail(*_tail(graph, cuts[layer]))
    if not any(True for _ in tail.parameters()):
        raise ValueError(f"the backbone cannot be split behind '{layer}': no weights are left for subnetworks")
    return Split(copy.deepcopy(fx.GraphModule(*trunk)).eval().requires_grad_(False), copy.deepcopy(tail))


@torch.no_grad()
def suggest_trunk(backbone: nn.Module, pixels: Tensor) -> str | None:
    """Return the layer behind which to split: with `TRUNK_SHARES` of the operations before it, and the smallest maps.

    Return None if there is no such layer, or if the backbone cannot be traced.
    """
    try:
        graph = _traced(backbone)
    except ValueError:
        return None
    meter = _Meter(graph)
    meter.run(pixels)
    total = sum(meter.operations.values())
    low, high = (share * total for share in TRUNK_SHARES)
    before = dict(zip(meter.operations, accumulate(meter.operations.values()), strict=True))
    cuts = {layer: node for layer, node in _cuts(graph).items() if low <= before[node] <= high}
    return min(cuts, key=lambda layer: (meter.values[cuts[layer]], layer.count(".")), default=None)


class _Meter(fx.Interpreter):
    """Runs a graph and records the operations of each node and the number of values it returns."""

    def __init__(self, graph: fx.GraphModule):
        super().__init__(graph)
        self.operations: dict[fx.Node, int] = {}
        self.values: dict[fx.Node, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run a node and record its cost."""
        with FlopCounterMode(display=False) as counter:
            result = super().run_node(n)
        self.operations[n] = counter.get_total_flops()
        self.values[n] = result.numel() if isinstance(result, Tensor) else 0
        return result


def _traced(backbone: nn.Module) -> fx.GraphModule:
    """Return the graph of a copy of the backbone in eval mode."""
    try:
        return trace_module(copy.deepcopy(backbone).eval())
    except Exception as error:  # a traced forward may raise anything
        raise ValueError(
            f"the backbone cannot be split into a trunk and a tail: torch.fx cannot trace it ({first_line(error)})"
        ) from error


def _cuts(graph: fx.GraphModule) -> dict[str, fx.Node]:
    """Return the values that alone connect what is before them with what follows, by the layer that returns them."""
    nodes = [node for node in graph.graph.nodes if node.op not in ("get_attr", "output")]
    place = {node: index for index, node in enumerate(nodes)}
    layers_end: dict[str, int] = {}
    for node in nodes:
        for layer in _layers_of(node):
            layers_end[layer] = place[node]
    cuts: dict[str, fx.Node] = {}
    furthest = 0  # place of the last reader of the values seen before this one
    for index, node in enumerate(nodes[:-1]):
        ended = [layer for layer in _layers_of(node) if layers_end[layer] == index]
        if furthest <= index and node.op != "placeholder" and ended:
            cuts[ended[0]] = node  # the outermost layer
        furthest = max([furthest, *(place[user] for user in node.users if user in place)])
    return cuts


def _layers_of(node: fx.Node) -> list[str]:
    """Return the names of the modules that a node runs in, the outermost first."""
    return [name for name, _ in node.meta.get("nn_module_stack", {}).values() if name]


def _trunk(graph: fx.GraphModule, last: fx.Node) -> tuple[fx.GraphModule, fx.Graph]:
    """Return the part of a graph that ends with a node, and the module that has its layers."""
    part, values = fx.Graph(), {}
    nodes = list(graph.graph.nodes)
    for node in nodes[: nodes.index(last) + 1]:
        values[node] = part.node_copy(node, values.__getitem__)
    part.output(values[last])
    return graph, part


def _tail(graph: fx.GraphModule, last: fx.Node) -> tuple[fx.GraphModule, fx.Graph]:
    """Return the part of a graph that follows a node, and the module that has its layers."""
    part = fx.Graph()
    values = {last: part.placeholder("maps")}
    nodes = list(graph.graph.nodes)
    before, after = nodes[: nodes.index(last)], nodes[nodes.index(last) + 1 :]
    parameters = [node for node in before if node.op == "get_attr" and not node.users.keys().isdisjoint(after)]
    for node in parameters + after:
        values[node] = part.node_copy(node, values.__getitem__)
    return graph, part


def keep_maps(batches: Iterable[Tensor | Maps], compute: Callable[[Tensor | Maps], Maps]) -> "MapStream | MapSequence":
    """Return the maps of batches of images, each computed when it is first read, and kept if there is room."""
    return MapSequence(batches, compute) if isinstance(batches, Sequence) else MapStream(batches, compute)


class MapStream:
    """The maps of batches that can be iterated over several times; kept if they all fit in `KEPT_BYTES`."""

    def __init__(self, batches: Iterable[Tensor | Maps], compute: Callable[[Tensor | Maps], Maps]):
        self._batches, self._compute = batches, compute
        self._kept: list[Maps] | None = None

    def __iter__(self) -> Iterator[Maps]:
        if self._kept is not None:
            yield from self._kept
            return
        kept: list[Maps] = []
        size = 0
        for batch in self._batches:
            maps = self._compute(batch)
            size += maps.values.nbytes
            if size <= KEPT_BYTES:
                kept.append(maps)
            yield maps
        if size <= KEPT_BYTES:
            self._kept = kept


class MapSequence(Sequence[Maps]):
    """The maps of a sequence of batches; the first ones are kept, up to `KEPT_BYTES`."""

    def __init__(self, batches: Sequence[Tensor | Maps], compute: Callable[[Tensor | Maps], Maps]):
        self._batches, self._compute = batches, compute
        self._kept: dict[int, Maps] = {}
        self._size = 0

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: Any) -> Any:
        index = range(len(self))[index]
        if isinstance(index, range):
            return [self[each] for each in index]
        if index not in self._kept:
            maps = self._compute(self._batches[index])
            self._size += maps.values.nbytes
            if self._size > KEPT_BYTES:
                return maps
            self._kept[index] = maps
        return self._kept[index]
