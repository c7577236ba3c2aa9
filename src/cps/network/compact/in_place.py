"""Let a traced network write over values that nothing else reads: additions and ReLUs after convolutions.

On a CPU they spend most of their time on writing to new memory.
"""

import operator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx, nn

from cps.network.compact.fx_tracing import ADDITIONS

IN_PLACE: tuple[Any, ...] = (operator.iadd, "add_")  # additions whose result is their first argument


def work_in_place(graph: fx.GraphModule) -> fx.GraphModule:
    """Let additions and ReLUs write over values that they alone read; return the same graph, for inference only."""
    for node in graph.graph.nodes:
        if node.target is F.relu and node.args and _is_disposable(graph, node.args[0]):
            node.kwargs = {**node.kwargs, "inplace": True}
        elif node.target in ADDITIONS and node.target not in IN_PLACE and len(node.args) == 2 and not node.kwargs:
            _write_over_a_summand(graph, node)
    graph.recompile()
    return graph


def _write_over_a_summand(graph: fx.GraphModule, node: fx.Node) -> None:
    first, second = node.args
    for summand, other in ((first, second), (second, first)):
        if _is_disposable(graph, summand) and summand is not other:
            node.op, node.target, node.args = "call_function", add_to, (summand, other)
            return


def add_to(summand: Any, other: Any) -> Any:
    """Return the sum, in the memory of `summand` if it has the shape and the type of both."""
    if not isinstance(summand, Tensor) or not isinstance(other, Tensor):
        return summand + other
    is_alike = summand.shape == other.shape and summand.dtype == other.dtype
    return summand.add_(other) if is_alike else summand + other


def _is_disposable(graph: fx.GraphModule, value: object) -> bool:
    """Return True for a value in new memory that is read once."""
    if not isinstance(value, fx.Node) or len(value.users) != 1:
        return False
    if value.op == "call_module":
        return type(graph.get_submodule(str(value.target))) in (nn.Conv2d, nn.Linear, nn.BatchNorm2d)
    if value.target in IN_PLACE:
        return _is_disposable(graph, value.args[0])
    return value.target in (*ADDITIONS, add_to, F.conv2d, F.linear)
