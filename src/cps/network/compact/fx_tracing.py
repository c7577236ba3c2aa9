"""Trace a module with torch.fx while other threads keep running modules.

torch.fx patches methods of the `nn.Module` class for the whole process while it traces. The tracer here records only
the calls of its own thread and passes those of other threads through unchanged. One module is traced at a time.
"""

import operator
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from cps.runtime.process_state import TRACE_LOCK

# Targets of graph nodes.
ADDITIONS: tuple[Any, ...] = (operator.add, operator.iadd, torch.add, "add", "add_")
RELUS: tuple[Any, ...] = (F.relu, torch.relu, "relu", "relu_")


def trace_module(module: nn.Module) -> fx.GraphModule:
    """Return the module as a graph of its operations."""
    with TRACE_LOCK:
        tracer = _ThreadTracer()
        graph = tracer.trace(module)
        return fx.GraphModule(tracer.root, graph, type(module).__name__)


class _ThreadTracer(fx.Tracer):
    """A tracer that records only the calls of the thread that created it."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record the call of a submodule."""
        is_ours = threading.get_ident() == self._thread
        return super().call_module(m, forward, args, kwargs) if is_ours else forward(*args, **kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Record the read of a parameter."""
        is_ours = threading.get_ident() == self._thread
        return super().getattr(attr, attr_val, parameter_proxy_cache) if is_ours else attr_val
