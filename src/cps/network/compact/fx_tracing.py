"""Trace a module with torch.fx while other threads keep running modules.

torch.fx patches methods of the `nn.Module` class for the whole process while it traces. The tracer here records only
the calls of its own thread and passes those of other threads through unchanged. One module is traced at a time.

Convolutions and linear layers stay whole, also those whose class has another forward.
"""

import operator
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from cps.runtime.process_state import TRACE_LOCK
from cps.runtime.text import first_line

# Targets of graph nodes.
ADDITIONS: tuple[Any, ...] = (operator.add, operator.iadd, torch.add, "add", "add_")
RELUS: tuple[Any, ...] = (F.relu, torch.relu, "relu", "relu_")
READS: tuple[Any, ...] = (getattr, operator.getitem, operator.eq, operator.ne, operator.le, operator.ge, "size", "dim")


class TraceError(ValueError):
    """Raised for a module that cannot be traced."""


def trace_module(module: nn.Module) -> fx.GraphModule:
    """Return the module as a graph of its operations; raise `TraceError`, which names the layer, if that fails."""
    with TRACE_LOCK:
        tracer = _ThreadTracer()
        try:
            graph = tracer.trace(module)
        except Exception as error:  # a traced forward may raise anything
            layer = describe_layer(tracer.module_stack)
            raise TraceError(f"{layer} cannot be traced: {type(error).__name__}: {first_line(error)}") from error
        traced = fx.GraphModule(tracer.root, graph, type(module).__name__)
    _remove_assertions(traced)
    return traced


def describe_layer(stack: Mapping[str, tuple[str, type]]) -> str:
    """Return the name and the type of the innermost of nested modules, as a node of a graph holds them."""
    if not stack:
        return "the backbone itself"
    path, kind = list(stack.values())[-1]
    return f"layer '{path}' ({kind.__name__})"


def _remove_assertions(traced: fx.GraphModule) -> None:
    """Remove checks of shapes, which would count as readers of all channels."""
    for node in list(traced.graph.nodes):
        if node.target is torch._assert:
            traced.graph.erase_node(node)
    remove_unused_reads(traced.graph)
    traced.recompile()


def remove_unused_reads(graph: fx.Graph) -> None:
    """Remove nodes that read a tensor of the module, or a shape, for nothing."""
    for node in reversed(list(graph.nodes)):
        if not node.users and (node.op == "get_attr" or node.target in READS):
            graph.erase_node(node)


def record_shapes(graph: fx.GraphModule, pixels: Tensor) -> None:
    """Run a graph and write the shape of every tensor into the `meta` of its node."""
    _ShapeRecorder(graph).run(pixels)


class _ShapeRecorder(fx.Interpreter):
    """Like torch's ShapeProp, whose import of symbolic shapes takes half a second."""

    def run_node(self, n: fx.Node) -> Any:
        """Run one operation."""
        value = super().run_node(n)
        if isinstance(value, Tensor):
            n.meta["shape"] = value.shape
        return value


class _ThreadTracer(fx.Tracer):
    """A tracer that records only the calls of the thread that created it."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return True for a module that is one operation of the graph."""
        return isinstance(m, nn.Conv2d | nn.Linear) or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record the call of a submodule."""
        is_ours = threading.get_ident() == self._thread
        return super().call_module(m, forward, args, kwargs) if is_ours else forward(*args, **kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Record the read of a parameter."""
        is_ours = threading.get_ident() == self._thread
        return super().getattr(attr, attr_val, parameter_proxy_cache) if is_ours else attr_val
