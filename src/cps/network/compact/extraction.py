"""Extract a sealed subnetwork as a compact network.

The backbone is traced. Batch norm layers are folded into the convolutions before them, and channels that no connection
of the subnetwork reads are removed from every layer that carries them. Channels of unknown operations are all kept; a
backbone that cannot be traced is not compacted at all. Where nothing can be removed, the layer that prevents it is
named.
"""

import copy
import operator
from collections.abc import Callable
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from cps.closed_form.spaces import root_normalize
from cps.data.normalize import Prepare, as_floats
from cps.data.rotations import average_views, class_logits
from cps.network.compact.fx_tracing import (
    ADDITIONS,
    RELUS,
    TraceError,
    describe_layer,
    record_shapes,
    remove_unused_reads,
    trace_module,
)
from cps.network.outputs import Outputs, are_close
from cps.network.partition import set_tensors
from cps.network.subnetwork import Subnetwork
from cps.runtime.devices import full_precision
from cps.runtime.text import first_line

# Operations that process each channel separately and keep the order of channels.
CHANNELWISE_MODULES = (
    nn.ReLU, nn.ReLU6, nn.SiLU, nn.GELU, nn.ELU, nn.LeakyReLU, nn.Sigmoid, nn.Tanh, nn.Hardswish, nn.Hardsigmoid,
    nn.Identity, nn.Dropout, nn.Dropout2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Mish, nn.Upsample,
)  # fmt: skip
CHANNELWISE_FUNCTIONS = {
    *RELUS, F.relu6, F.silu, F.gelu, F.hardswish, F.hardsigmoid, torch.sigmoid, torch.tanh, F.dropout,
    F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.elu, F.leaky_relu, torch.relu_, F.mish, F.interpolate,
    "sigmoid", "tanh", "clamp", "contiguous",
}  # fmt: skip
ELEMENTWISE = {*ADDITIONS, operator.mul, operator.imul, torch.mul, "mul", "mul_"}  # of two values, or with a number
WITH_NUMBER = {operator.sub, operator.truediv, operator.itruediv, torch.div, "sub", "div", "div_"}


class Standalone(nn.Module):
    """A sealed subnetwork as a plain module: images, as floats from 0 to 1 or as bytes, -> logits over `classes`.

    With a `trunk`, the backbone reads its maps. `pretrained` returns the features for the pretrained head from them.
    """

    def __init__(
        self,
        backbone: nn.Module,
        subnetwork: Subnetwork,
        prepare: Prepare,
        *,
        trunk: nn.Module | None = None,
        pretrained: nn.Module | None = None,
    ):
        super().__init__()
        weight = subnetwork.head["weight"]
        self.normalize = nn.Identity() if prepare.normalize is None else prepare.normalize.as_layer(weight.device)
        self.backbone, self.dtype = backbone, prepare.dtype
        outputs, features = weight.shape
        self.head = nn.Linear(features, outputs, dtype=weight.dtype, device=weight.device).requires_grad_(False)
        self.head.load_state_dict(subnetwork.head)
        self.trunk = nn.Identity() if trunk is None else trunk
        self.pretrained = pretrained
        self.pretrained_head: nn.Linear | None = None
        if subnetwork.pretrained_head:
            weight = subnetwork.pretrained_head["weight"]
            self.pretrained_head = nn.Linear(weight.shape[1], outputs, bias=False, device=weight.device)
            self.pretrained_head.requires_grad_(False).load_state_dict(subnetwork.pretrained_head)
        self.classes, self.views = subnetwork.classes, subnetwork.views
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, shape (N, classes)."""
        return self.outputs(images).logits

    def outputs(self, images: Tensor) -> Outputs:
        """Return features and logits, averaged over all views."""
        pixels = self.pixels(images)
        return self.from_pixels(pixels, lambda: self.pretrained(pixels) if self.pretrained else pixels)

    def from_pixels(self, pixels: Tensor, pretrained: Callable[[], Tensor]) -> Outputs:
        """Return features and logits from the backbone's input; `pretrained` returns the pretrained features."""
        outputs = self.from_features(torch.stack([self.backbone(view(pixels)).float() for view in self.views]))
        if self.pretrained_head is None:
            return outputs
        return Outputs(outputs.features, outputs.logits + self.pretrained_head(pretrained()))

    def from_features(self, features: Tensor) -> Outputs:
        """Return features and logits, averaged over all views, from features (views, N, d)."""
        features = features if self.pretrained_head is None else root_normalize(features)
        return Outputs(average_views(features), class_logits(features, self.views, self.head.weight, self.head.bias))

    def pixels(self, images: Tensor) -> Tensor:
        """Return the backbone's input for images: scaled and normalised, after the trunk if any."""
        return self.trunk(self.normalize(as_floats(images)).to(self.dtype))


def copy_with_tensors(backbone: nn.Module, tensors: dict[str, Tensor]) -> nn.Module:
    """Return a copy of the backbone that holds these tensors, in eval mode."""
    copied = copy.deepcopy(backbone).eval().requires_grad_(False)
    set_tensors(copied, tensors)
    return copied


class Extraction(NamedTuple):
    """A compact network, or None if there is none, and why channels were not removed; "" if they were."""

    network: fx.GraphModule | None
    obstacle: str = ""


@torch.no_grad()
def extract_compact(backbone: nn.Module, tensors: dict[str, Tensor], pixels: Tensor) -> Extraction:
    """Return a compact module that computes what the backbone computes with these tensors, in eval mode.

    `pixels` are images on which both are compared. There is none if the backbone cannot be traced, changes its input in
    place, or if the compact module computes different features.
    """
    dense = copy_with_tensors(backbone, tensors)
    try:
        given = pixels.clone()
        with full_precision():
            expected = dense(given)  # before tracing, whose error for a failing forward is long and obscure
        if not torch.equal(given, pixels):
            raise ValueError("it changes its input in place, but compact networks share their input")
        compact, obstacle = _compact_graph(trace_module(copy.deepcopy(dense)), pixels)
        with full_precision():
            if are_close(compact(pixels), expected):
                return Extraction(compact, obstacle)
        return Extraction(None, "the compact network computes different features")
    except TraceError as error:
        return Extraction(None, str(error))
    except Exception as error:  # a traced forward may raise anything
        return Extraction(None, f"{type(error).__name__}: {first_line(error)}")


def _compact_graph(graph: fx.GraphModule, pixels: Tensor) -> tuple[fx.GraphModule, str]:
    """Fold batch norm layers and remove unused channels, in place; return the graph and what prevented all removals."""
    record_shapes(graph, pixels)
    graph = _restore_norms(graph)
    _fold_norms(graph)
    channels = ChannelGroups(graph)
    used = channels.find_used()
    for node in graph.graph.nodes:
        if node.op != "call_module":
            continue
        layer = graph.get_submodule(node.target)
        if isinstance(layer, nn.Conv2d | nn.Linear | nn.BatchNorm2d):
            inputs = used.get(channels.find_root(node.args[0]))
            outputs = used.get(channels.find_root(node))
            _keep_channels(layer, inputs, outputs)
    return graph, "" if any(not mask.all() for mask in used.values()) else channels.find_obstacle()


def _restore_norms(graph: fx.GraphModule) -> fx.GraphModule:
    """Return the graph with calls of `F.batch_norm` turned into batch norm layers.

    Batch norm layers of other classes call it, such as timm's, which end in an activation.
    """
    for node in list(graph.graph.nodes):
        if node.target is not F.batch_norm or _num_axes(node) != 4:
            continue
        given = signature(F.batch_norm).bind(*node.args, **node.kwargs)
        given.apply_defaults()
        arguments = given.arguments
        tensors = [arguments[name] for name in ("running_mean", "running_var", "weight", "bias")]
        if arguments["training"] or not all(isinstance(each, fx.Node) and each.op == "get_attr" for each in tensors):
            continue
        mean, variance, weight, bias = (operator.attrgetter(str(each.target))(graph) for each in tensors)
        norm = nn.BatchNorm2d(len(mean), eps=arguments["eps"]).requires_grad_(False).eval()
        norm.weight, norm.bias = weight, bias
        norm.running_mean, norm.running_var = mean, variance
        name = f"norm_{node.name}"
        graph.add_submodule(name, norm)
        with graph.graph.inserting_before(node):
            layer = graph.graph.call_module(name, (arguments["input"],))
        layer.meta = dict(node.meta)
        node.replace_all_uses_with(layer)
        graph.graph.erase_node(node)
    remove_unused_reads(graph.graph)
    return fx.GraphModule(graph, graph.graph, type(graph).__name__)  # without the tensors that only these calls read


def _fold_norms(graph: fx.GraphModule) -> None:
    """Fold each batch norm layer into the convolution before it.

    Layers that are called twice, and convolutions whose output has another reader, stay as they are.
    """
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


class ChannelGroups:
    """Group the values of a graph that carry the same channels, and find the channels that are read.

    Values that are added or multiplied carry the same channels. A convolution reads one group and writes another.
    """

    def __init__(self, graph: fx.GraphModule):
        self.graph = graph
        self.parent: dict[fx.Node, fx.Node] = {}  # union-find
        self.pinned: set[fx.Node] = set()  # values of unknown operations: all their channels are kept
        self.unknown: list[fx.Node] = []  # these operations
        self.readers: list[tuple[fx.Node, nn.Conv2d | nn.Linear]] = []
        for node in graph.graph.nodes:
            self.parent[node] = node
            self._visit(node)

    def find_root(self, node: fx.Node) -> fx.Node:
        """Return the value that represents the group of a value."""
        while self.parent[node] is not node:
            node = self.parent[node]
        return node

    def find_used(self) -> dict[fx.Node, Tensor]:
        """Return a mask of the channels that some layer reads, by the root of a group.

        Groups that are not listed keep all channels. A layer reads a channel if one of its used outputs has a
        connection to it, so the masks shrink until none changes.
        """
        pinned = {self.find_root(node) for node in self.pinned}
        writers = {self.find_root(node): layer for node, layer in self.readers}
        used = {
            root: torch.ones(len(layer.weight), dtype=torch.bool, device=layer.weight.device)
            for root, layer in writers.items()
            if root not in pinned
        }
        while True:
            before = {root: int(mask.sum()) for root, mask in used.items()}
            read = {root: torch.zeros_like(mask) for root, mask in used.items()}
            for node, layer in self.readers:
                source = self.find_root(node.args[0])  # pyright: ignore[reportArgumentType]
                if source in read:
                    outputs = used.get(self.find_root(node))
                    weight = layer.weight if outputs is None else layer.weight[outputs]
                    read[source] |= weight.flatten(2).ne(0).any(-1).any(0) if weight.ndim > 2 else weight.ne(0).any(0)
            for mask in read.values():
                mask[0] |= not mask.any()  # a layer must have at least one channel
            used = read
            if before == {root: int(mask.sum()) for root, mask in used.items()}:
                return used

    def find_obstacle(self) -> str:
        """Return a sentence about the unknown operation that keeps the channels of most weights; "" if none does."""

        def kept_by(node: fx.Node) -> int:
            roots = {self.find_root(each) for each in (node, *node.all_input_nodes)}
            return sum(layer.weight.numel() for reader, layer in self.readers if self.find_root(reader) in roots)

        worst = max(self.unknown, key=kept_by, default=None)
        if worst is None or kept_by(worst) == 0:
            return ""
        return f"{describe_layer(worst.meta.get('nn_module_stack', {}))} needs all channels of its input"

    def _visit(self, node: fx.Node) -> None:
        """Join the node with its inputs if it keeps their channels, list it if it reads them, and pin it otherwise."""
        inputs = node.all_input_nodes
        layer = self.graph.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(layer, nn.Conv2d | nn.Linear) and not _has_only_weight_and_bias(layer):
            self._pin(node)
        elif isinstance(layer, nn.Conv2d) and layer.groups == layer.in_channels == layer.out_channels:
            self._join(node, inputs[0])
        elif (isinstance(layer, nn.Conv2d) and layer.groups == 1) or (
            isinstance(layer, nn.Linear) and _num_axes(inputs[0]) == 2
        ):
            self.readers.append((node, layer))
        elif isinstance(layer, (*CHANNELWISE_MODULES, nn.BatchNorm2d)) or node.target in CHANNELWISE_FUNCTIONS:
            self._join(node, inputs[0])
        elif node.target in ELEMENTWISE and len(inputs) == 2 and _have_same_channels(*inputs):
            self._join(node, inputs[0])
            self._join(node, inputs[1])
        elif self._keeps_channels(node, layer):
            self._join(node, inputs[0])
        else:
            self._pin(node)

    def _pin(self, node: fx.Node) -> None:
        """Keep all channels that an operation reads and writes."""
        self.pinned.update([node, *node.all_input_nodes])
        if node.op.startswith("call"):
            self.unknown.append(node)

    def _keeps_channels(self, node: fx.Node, layer: nn.Module | None) -> bool:
        """Return True if the node is an operation with a number, or a mean or flattening to one number per channel."""
        inputs = node.all_input_nodes
        if node.target in (ELEMENTWISE | WITH_NUMBER) and len(inputs) == 1:
            return _shape(node) == _shape(inputs[0])
        is_mean = node.target in ("mean", torch.mean)
        is_flattening = isinstance(layer, nn.Flatten) or node.target in (torch.flatten, "flatten")
        return (
            ((is_mean or is_flattening) and _num_axes(node) == 2) or (is_mean and _num_axes(node) == 4)
        ) and _have_same_channels(node, inputs[0])

    def _join(self, node: fx.Node, other: fx.Node) -> None:
        first, second = self.find_root(node), self.find_root(other)
        if first is not second:
            self.parent[first] = second


def _keep_channels(layer: nn.Module, inputs: Tensor | None, outputs: Tensor | None) -> None:
    """Remove all channels of a layer but those in the masks `inputs` and `outputs`; None keeps all."""
    if isinstance(layer, nn.BatchNorm2d) or (isinstance(layer, nn.Conv2d) and layer.groups > 1):
        inputs = None
    for name, value in [*layer.named_parameters(), *layer.named_buffers()]:
        if value.ndim == 0:
            continue
        kept = value if outputs is None else value[outputs]
        kept = kept if inputs is None or value.ndim < 2 else kept[:, inputs]
        if isinstance(value, nn.Parameter):
            setattr(layer, name, nn.Parameter(kept.clone(), requires_grad=False))
        else:
            setattr(layer, name, kept.clone())
    if isinstance(layer, nn.Conv2d):
        is_depthwise = layer.groups == layer.in_channels == layer.out_channels
        layer.out_channels = len(layer.weight)
        layer.groups = layer.out_channels if is_depthwise else layer.groups
        layer.in_channels = layer.weight.shape[1] * layer.groups
    elif isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    elif isinstance(layer, nn.BatchNorm2d):
        layer.num_features = len(layer.weight)


def _has_only_weight_and_bias(layer: nn.Module) -> bool:
    """Return True unless the layer has further tensors, whose channels are unknown."""
    return {name for name, _ in (*layer.named_parameters(), *layer.named_buffers())} <= {"weight", "bias"}


def _shape(node: fx.Node) -> Any:
    return node.meta.get("shape")


def _num_axes(node: fx.Node) -> int:
    shape = _shape(node)
    return 0 if shape is None else len(shape)


def _have_same_channels(first: fx.Node, second: fx.Node) -> bool:
    shapes = [_shape(node) for node in (first, second)]
    return all(shape is not None and len(shape) > 1 for shape in shapes) and shapes[0][1] == shapes[1][1]
