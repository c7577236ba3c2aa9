"""Extraction: a sealed subnetwork as a small network of its own.

Channels that no kernel of the subnetwork reads are removed from every layer that carries them, and batch norm
layers are folded into the convolutions before them. The module's graph is traced; where it cannot be, or where an
operation is not known, nothing is removed there.
"""

import copy
import logging
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn.utils.fusion import fuse_conv_bn_eval

from cps.data.normalize import Prepare, as_floats
from cps.data.rotations import class_logits, mean_of
from cps.network.compact.fx_tracing import ADDITIONS, RELUS, traced
from cps.network.outputs import Outputs, are_close
from cps.network.partition import set_tensors
from cps.network.subnetwork import Subnetwork
from cps.runtime.cuda_graphs import first_line
from cps.runtime.devices import full_precision

log = logging.getLogger(__name__)

# Operations that work on each channel by itself and leave the channels where they are.
CHANNELWISE_MODULES = (
    nn.ReLU, nn.ReLU6, nn.SiLU, nn.GELU, nn.ELU, nn.LeakyReLU, nn.Sigmoid, nn.Tanh, nn.Hardswish, nn.Hardsigmoid,
    nn.Identity, nn.Dropout, nn.Dropout2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d,
)  # fmt: skip
CHANNELWISE_FUNCTIONS = {
    *RELUS, F.relu6, F.silu, F.gelu, F.hardswish, F.hardsigmoid, torch.sigmoid, torch.tanh, F.dropout,
    F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.elu, F.leaky_relu, torch.relu_,
    "sigmoid", "tanh", "clamp", "contiguous",
}  # fmt: skip
COMBINING = {*ADDITIONS, operator.mul, operator.imul, torch.mul, "mul", "mul_"}


class Standalone(nn.Module):
    """A sealed subnetwork on its own: images, as floats from 0 to 1 or as bytes, -> logits over `classes`."""

    def __init__(self, backbone: nn.Module, subnetwork: Subnetwork, prepare: Prepare):
        super().__init__()
        weight = subnetwork.head["weight"]
        self.normalize = nn.Identity() if prepare.normalize is None else prepare.normalize.as_layer(weight.device)
        self.backbone, self.dtype = backbone, prepare.dtype
        outputs, features = weight.shape
        self.head = nn.Linear(features, outputs, dtype=weight.dtype, device=weight.device).requires_grad_(False)
        self.head.load_state_dict(subnetwork.head)
        self.classes, self.views = subnetwork.classes, subnetwork.views
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, shape (N, classes)."""
        return self.outputs(images).logits

    def outputs(self, images: Tensor) -> Outputs:
        """Return features and logits, averaged over all looks."""
        pixels = self.normalize(as_floats(images)).to(self.dtype)
        seen = torch.stack([self.backbone(view(pixels)).float() for view in self.views])
        return Outputs(mean_of(seen), class_logits(seen, self.views, self.head.weight, self.head.bias))


def whole(backbone: nn.Module, tensors: dict[str, Tensor]) -> nn.Module:
    """Return a copy of the backbone with these tensors in it, in eval mode."""
    baked = copy.deepcopy(backbone).eval().requires_grad_(False)
    set_tensors(baked, tensors)
    return baked


@torch.no_grad()
def extracted(backbone: nn.Module, tensors: dict[str, Tensor], pixels: Tensor) -> nn.Module | None:
    """Return a small module that computes what the backbone does with these tensors, in eval mode.

    `pixels` are some images to try it on. None where the module's graph cannot be traced.
    """
    baked = whole(backbone, tensors)
    try:
        given = pixels.clone()
        with full_precision():
            expected = baked(given)  # first: where this fails, what follows would say so at length
        if not torch.equal(given, pixels):
            raise ValueError("it changes its input in place, which small networks share")
        small = _shrunk(traced(copy.deepcopy(baked)), pixels)
        with full_precision():
            if are_close(small(pixels), expected):
                return small
        reason = "the small network computes something else"
    except Exception as error:  # whatever a module's forward does while it is traced
        reason = f"{type(error).__name__}: {first_line(error)}"
    log.info("subnetworks run at full size (%s)", reason)
    return None


def _shrunk(graph: fx.GraphModule, pixels: Tensor) -> fx.GraphModule:
    ShapeProp(graph).propagate(pixels)
    _fold_norms(graph)
    carried = _Channels(graph)
    kept = carried.kept()
    for node in graph.graph.nodes:
        if node.op != "call_module":
            continue
        layer = graph.get_submodule(node.target)
        if isinstance(layer, nn.Conv2d | nn.Linear | nn.BatchNorm2d):
            inside = kept.get(carried.find(node.args[0]))
            outside = kept.get(carried.find(node))
            _cut(layer, inside, outside)
    return graph


def _fold_norms(graph: fx.GraphModule) -> None:
    """Fold every batch norm layer into the convolution before it, where nothing else reads that or uses either."""
    called = [node.target for node in graph.graph.nodes if node.op == "call_module"]
    for node in list(graph.graph.nodes):
        norm = graph.get_submodule(node.target) if node.op == "call_module" else None
        before = node.args[0] if isinstance(norm, nn.BatchNorm2d) else None
        if before is None or before.op != "call_module" or len(before.users) > 1:
            continue
        if called.count(before.target) > 1 or called.count(node.target) > 1:
            continue
        layer = graph.get_submodule(before.target)
        if isinstance(layer, nn.Conv2d) and norm.running_mean is not None:  # pyright: ignore
            owner, _, name = str(before.target).rpartition(".")
            setattr(graph.get_submodule(owner), name, fuse_conv_bn_eval(layer, norm))  # pyright: ignore
            node.replace_all_uses_with(before)
            graph.graph.erase_node(node)
    graph.delete_all_unused_submodules()
    graph.graph.lint()
    graph.recompile()


class _Channels:
    """Which values of a graph carry the same channels, and who reads them.

    Values that are added or multiplied carry the same channels; a convolution reads some and makes new ones.
    """

    def __init__(self, graph: fx.GraphModule):
        self.graph = graph
        self.parent: dict[fx.Node, fx.Node] = {}
        self.pinned: set[fx.Node] = set()
        self.readers: list[tuple[fx.Node, nn.Conv2d | nn.Linear]] = []
        for node in graph.graph.nodes:
            self.parent[node] = node
            self._visit(node)

    def find(self, node: fx.Node) -> fx.Node:
        """Return the value that stands for all that carry the same channels."""
        while self.parent[node] is not node:
            node = self.parent[node]
        return node

    def kept(self) -> dict[fx.Node, Tensor]:
        """Return which channels somebody reads, by the value that stands for them; those of the rest are all kept."""
        pinned = {self.find(node) for node in self.pinned}
        made = {self.find(node): layer for node, layer in self.readers}
        kept = {
            root: torch.ones(len(layer.weight), dtype=torch.bool, device=layer.weight.device)
            for root, layer in made.items()
            if root not in pinned
        }
        while True:
            before = {root: int(mask.sum()) for root, mask in kept.items()}
            read = {root: torch.zeros_like(mask) for root, mask in kept.items()}
            for node, layer in self.readers:
                source = self.find(node.args[0])  # pyright: ignore[reportArgumentType]
                if source in read:
                    alive = kept.get(self.find(node))
                    weight = layer.weight if alive is None else layer.weight[alive]
                    read[source] |= weight.flatten(2).ne(0).any(-1).any(0) if weight.ndim > 2 else weight.ne(0).any(0)
            for mask in read.values():
                mask[0] |= not mask.any()  # a layer without any channel is no layer
            kept = read
            if before == {root: int(mask.sum()) for root, mask in kept.items()}:
                return kept

    def _visit(self, node: fx.Node) -> None:
        inputs = node.all_input_nodes
        layer = self.graph.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(layer, nn.Conv2d) and layer.groups == layer.in_channels == layer.out_channels:
            self._join(node, inputs[0])
        elif (isinstance(layer, nn.Conv2d) and layer.groups == 1) or (
            isinstance(layer, nn.Linear) and _axes(inputs[0]) == 2
        ):
            self.readers.append((node, layer))
        elif isinstance(layer, (*CHANNELWISE_MODULES, nn.BatchNorm2d)) or node.target in CHANNELWISE_FUNCTIONS:
            self._join(node, inputs[0])
        elif node.target in COMBINING and len(inputs) == 2 and _have_same_channels(*inputs):
            self._join(node, inputs[0])
            self._join(node, inputs[1])
        elif self._keeps_channels(node, layer):
            self._join(node, inputs[0])
        else:
            self.pinned.update([node, *inputs])

    def _keeps_channels(self, node: fx.Node, layer: nn.Module | None) -> bool:
        """Say whether a mean or a flattening leaves one number for each channel."""
        flattens = isinstance(layer, nn.Flatten) or node.target in (torch.flatten, "flatten", "mean", torch.mean)
        return flattens and _axes(node) == 2 and _have_same_channels(node, node.all_input_nodes[0])

    def _join(self, node: fx.Node, other: fx.Node) -> None:
        first, second = self.find(node), self.find(other)
        if first is not second:
            self.parent[first] = second


def _cut(layer: nn.Module, inside: Tensor | None, outside: Tensor | None) -> None:
    """Cut a layer down to the channels that are kept, those it reads and those it makes."""
    if isinstance(layer, nn.BatchNorm2d) or (isinstance(layer, nn.Conv2d) and layer.groups > 1):
        inside = None
    for name, value in [*layer.named_parameters(), *layer.named_buffers()]:
        if value.ndim == 0:
            continue
        cut = value if outside is None else value[outside]
        cut = cut if inside is None or value.ndim < 2 else cut[:, inside]
        if isinstance(value, nn.Parameter):
            setattr(layer, name, nn.Parameter(cut.clone(), requires_grad=False))
        else:
            setattr(layer, name, cut.clone())
    if isinstance(layer, nn.Conv2d):
        is_depthwise = layer.groups == layer.in_channels == layer.out_channels
        layer.out_channels = len(layer.weight)
        layer.groups = layer.out_channels if is_depthwise else layer.groups
        layer.in_channels = layer.weight.shape[1] * layer.groups
    elif isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    elif isinstance(layer, nn.BatchNorm2d):
        layer.num_features = len(layer.weight)


def _shape(node: fx.Node) -> Any:
    meta = node.meta.get("tensor_meta")
    return getattr(meta, "shape", None)


def _axes(node: fx.Node) -> int:
    shape = _shape(node)
    return 0 if shape is None else len(shape)


def _have_same_channels(first: fx.Node, second: fx.Node) -> bool:
    shapes = [_shape(node) for node in (first, second)]
    return all(shape is not None and len(shape) > 1 for shape in shapes) and shapes[0][1] == shapes[1][1]
