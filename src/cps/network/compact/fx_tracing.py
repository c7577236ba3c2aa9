"""Tracing: the graph of a module, while other threads go on with modules of their own.

torch.fx patches the class of all modules while it traces one. Here the calls of other threads pass by unchanged, and
one module is traced at a time.
"""

import operator
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

ADDITIONS: tuple[Any, ...] = (operator.add, operator.iadd, torch.add, "add", "add_")  # as targets of a graph's nodes
RELUS: tuple[Any, ...] = (F.relu, torch.relu, "relu", "relu_")

_ONE_AT_A_TIME = threading.Lock()


def traced(module: nn.Module) -> fx.GraphModule:
    """Return the module as a graph of its operations."""
    with _ONE_AT_A_TIME:
        tracer = _Tracer()
        graph = tracer.trace(module)
        return fx.GraphModule(tracer.root, graph, type(module).__name__)


class _Tracer(fx.Tracer):
    """Sees what the thread that made it does, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Note a call of a module of the graph."""
        is_ours = threading.get_ident() == self._thread
        return super().call_module(m, forward, args, kwargs) if is_ours else forward(*args, **kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Note that a parameter of the graph is read."""
        is_ours = threading.get_ident() == self._thread
        return super().getattr(attr, attr_val, parameter_proxy_cache) if is_ours else attr_val
