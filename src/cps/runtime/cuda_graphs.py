"""Capture: a function of tensors becomes a CUDA graph, replayed with one launch instead of hundreds; and compiling."""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from cps.runtime.cuda_streams import streams_of
from cps.runtime.locks import CopyableLock
from cps.runtime.seeding import RNG_LOCK

log = logging.getLogger(__name__)

WARM_CALLS = 3  # ordinary calls before the capture, the last in its thread, so that libraries have chosen their kernels
MOST_GRAPHS = 8  # of one function, each with memory of its own

_ALONE = CopyableLock()  # threads share streams: no other work may be on one that a capture records
_FAILED: dict[Any, torch.cuda.CUDAGraph] = {}  # of pools, which torch fills no more, and whose graphs it still looks at


class Captured:
    """A function of tensors on a GPU that is captured once for each shape of its inputs.

    It returns a list of tensors, or nothing. The first calls for a shape run as they are, which counts as work done,
    not as a trial; a capture after them records the work and does none. Where capturing is impossible, the function
    goes on running as it is, and the log says why.
    Functions that return nothing and run one after the other may share the memory of a `pool`.
    """

    def __init__(self, work: Callable[..., list[Tensor] | None], pool: Any = None):
        self._work, self._pool = work, pool
        self._calls: dict[tuple[torch.Size, ...], int] = {}
        self._graphs: dict[tuple[torch.Size, ...], _Graph] = {}
        self._too_large: set[tuple[torch.Size, ...]] = set()
        self._impossible = False
        self._turns = CopyableLock()

    def __call__(self, *inputs: Tensor) -> Any:
        """Do the work on these inputs."""
        with self._turns, torch.cuda.device(inputs[0].device if inputs else None):
            shapes = tuple(value.shape for value in inputs)
            if shapes in self._graphs:
                return self._replayed(self._graphs[shapes], inputs)
            outputs = self._apart(inputs)
            self._calls[shapes] = self._calls.get(shapes, 0) + 1
            if self._is_due(shapes) and RNG_LOCK.acquire(blocking=False):  # else later: others may be drawing numbers
                try:
                    self._capture(shapes, inputs)
                finally:
                    RNG_LOCK.release()
            return outputs

    def _is_due(self, shapes: tuple[torch.Size, ...]) -> bool:
        is_warm = self._calls[shapes] >= WARM_CALLS
        return is_warm and shapes not in self._too_large and len(self._graphs) < MOST_GRAPHS and not self._impossible

    def _replayed(self, graph: "_Graph", inputs: tuple[Tensor, ...]) -> list[Tensor] | None:
        stream = torch.cuda.current_stream()
        if stream != graph.stream:  # another thread's, perhaps, which may still be at work on the inputs before
            stream.wait_stream(graph.stream)
            graph.stream = stream
        _copy(inputs, graph.inputs)
        graph.graph.replay()
        if graph.outputs is None:
            return None
        outputs = [torch.empty_like(value) for value in graph.outputs]
        _copy(graph.outputs, outputs)
        return outputs

    def _apart(self, inputs: tuple[Tensor, ...]) -> list[Tensor] | None:
        """Run on a stream of its own, as a capture asks of the calls before it."""
        main, stream = torch.cuda.current_stream(), streams_of(torch.cuda.current_device()).apart
        with _ALONE:
            stream.wait_stream(main)
            try:
                with torch.cuda.stream(stream):
                    outputs = self._work(*inputs)
            finally:
                main.wait_stream(stream)
            for value in outputs or ():
                value.record_stream(main)  # which copies it before other work on that stream may overwrite it
            return None if outputs is None else [value.clone() for value in outputs]

    def _capture(self, shapes: tuple[torch.Size, ...], inputs: tuple[Tensor, ...]) -> None:
        """Capture the work on inputs of these shapes: one thread at a time, while others may replay theirs."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        pool = torch.cuda.graph_pool_handle() if self._pool is None or self._pool in _FAILED else self._pool
        with _ALONE, _no_inference(), _no_collecting():
            try:
                places = tuple(value.clone() for value in inputs)
                torch.cuda.synchronize()
                _forget_workspaces()
                own = streams_of(torch.cuda.current_device()).recorded  # torch's may be of another device
                with torch.cuda.graph(graph, pool=pool, stream=own, capture_error_mode="thread_local"):
                    outputs = self._work(*places)
            except RuntimeError as error:
                _FAILED[pool] = graph
                _end_capture(stream, pool)
                self._give_up(shapes, error)
                return
        self._graphs[shapes] = _Graph(graph, places, outputs, stream)

    def _give_up(self, shapes: tuple[torch.Size, ...], error: RuntimeError) -> None:
        """Go on without a graph: for inputs so large, or for all."""
        if isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__ from None
        if isinstance(error, torch.OutOfMemoryError) or isinstance(error.__context__, torch.OutOfMemoryError):
            self._too_large.add(shapes)
        else:
            self._impossible = True
        log.warning("work goes on without a CUDA graph: %s", first_line(error))

    def forget(self) -> None:
        """Keep no input of the last call."""
        for graph in self._graphs.values():
            for value in (*graph.inputs, *(graph.outputs or [])):
                value.zero_()


def _copy(values: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    """Copy values to where they belong, with one launch where they are of a kind."""
    if places:
        torch._foreach_copy_(list(places), list(values))  # pyright: ignore[reportPrivateImportUsage]


@contextmanager
def _no_inference() -> Iterator[None]:
    """Leave an inference mode of the caller's: what is made in it could not be written outside."""
    is_learning = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(is_learning):
        yield


@contextmanager
def _no_collecting() -> Iterator[None]:
    """Keep Python from collecting garbage: a graph may be among it, and to destroy one would end a capture."""
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_collecting:
            gc.enable()


def _forget_workspaces() -> None:
    """Let the next graph have memory for cuBLAS of its own: torch 2.12 to 2.14 free that of a stream with any graph."""
    if (2, 12) <= tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15):
        torch._C._cuda_clearCublasWorkspaces()  # pyright: ignore


def _end_capture(stream: torch.cuda.Stream, pool: Any) -> None:
    """Leave a capture that has failed: its stream, its memory, from which all would be taken otherwise, its draws."""
    torch.cuda.set_stream(stream)
    with suppress(RuntimeError, AttributeError):
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)  # pyright: ignore
    with suppress(RuntimeError):  # there may be no memory left even for this
        torch.cuda.synchronize()
        counter, own = torch.zeros(1, device="cuda"), streams_of(torch.cuda.current_device()).recorded
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=own, capture_error_mode="thread_local"):
            counter.add_(1)  # a capture that ends well lets random numbers be drawn again, as the failed one did not


def compiled_alone(method: Any) -> Any:
    """Return a method compiled for the shapes it meets first, into kernels that always give the same bits.

    It gets code of its own, since torch.compile counts what it has compiled by code, and stops at eight.
    """
    from torch._inductor import list_options

    function = method.__func__
    code = function.__code__.replace()
    own = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    options: Any = {"deterministic": True, "combo_kernels": True}
    known = {name: value for name, value in options.items() if name in list_options()}
    return torch.compile(MethodType(own, method.__self__), dynamic=False, options=known)


def first_line(error: BaseException) -> str:
    """Return the first line of an error, or its name where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]


@dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    outputs: list[Tensor] | None
    stream: torch.cuda.Stream  # of the last replay
