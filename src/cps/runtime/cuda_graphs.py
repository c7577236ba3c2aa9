"""Run the same work on a GPU again and again: CUDA graphs, the streams they need, and torch.compile.

A CUDA graph replays hundreds of kernels with one launch.
"""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType, MethodType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from cps.runtime.process_state import CAPTURE_LOCK, RNG_LOCK, STREAMS_LOCK, CopyableLock
from cps.runtime.text import first_line

log = logging.getLogger(__name__)

WARMUP_CALLS = 3  # before a capture, the last one in the same thread, so that libraries have chosen their kernels
MAX_GRAPHS = 8  # per function; each graph has its own memory
MAX_HELD_BYTES = 2**27  # of tensors that a side stream reads; beyond that the main stream waits for it
NUM_BRANCHES = 16  # streams for networks that run concurrently

Result = TypeVar("Result")
Shapes = tuple[torch.Size, ...]

# Graphs whose capture failed, by memory pool: torch still reads them, and such a pool cannot be used again.
_FAILED_GRAPHS: dict[Any, torch.cuda.CUDAGraph] = {}


class CapturedFunction:
    """A function of tensors on a GPU that is captured once per combination of input shapes.

    The function returns a list of tensors or None. The first calls with new shapes run it as usual; their results
    count. Then it is captured, which records the work without doing it. If the capture fails, the function keeps
    running as usual, and a warning says why. Functions that return None and never run at the same time may share the
    memory of one `pool`.
    """

    def __init__(self, function: Callable[..., list[Tensor] | None], pool: Any = None):
        self._function, self._pool = function, pool
        self._num_calls: dict[Shapes, int] = {}
        self._graphs: dict[Shapes, _Graph] = {}
        self._too_large: set[Shapes] = set()
        self._is_impossible = False
        self._lock = CopyableLock()

    def __call__(self, *inputs: Tensor) -> Any:
        """Call the function, or replay its graph."""
        with self._lock, torch.cuda.device(inputs[0].device if inputs else None):
            shapes = tuple(value.shape for value in inputs)
            if shapes in self._graphs:
                return _replay(self._graphs[shapes], inputs)
            outputs = self._warm_up(inputs)
            self._num_calls[shapes] = self._num_calls.get(shapes, 0) + 1
            # If another thread may be drawing random numbers, a later call captures.
            if self._is_due(shapes) and RNG_LOCK.acquire(blocking=False):
                try:
                    self._capture(shapes, inputs)
                finally:
                    RNG_LOCK.release()
            return outputs

    def _is_due(self, shapes: Shapes) -> bool:
        is_warm = self._num_calls[shapes] >= WARMUP_CALLS
        may_capture = shapes not in self._too_large and not self._is_impossible
        return is_warm and may_capture and len(self._graphs) < MAX_GRAPHS

    def _warm_up(self, inputs: tuple[Tensor, ...]) -> list[Tensor] | None:
        """Call the function on the warm-up stream: a capture requires that earlier calls ran on a side stream."""
        main, stream = torch.cuda.current_stream(), cuda_streams(torch.cuda.current_device()).warmup
        with CAPTURE_LOCK:
            stream.wait_stream(main)
            try:
                with torch.cuda.stream(stream):
                    outputs = self._function(*inputs)
            finally:
                main.wait_stream(stream)
            for value in outputs or ():
                value.record_stream(main)  # the main stream copies it before the warm-up stream may reuse its memory
            return None if outputs is None else [value.clone() for value in outputs]

    def _capture(self, shapes: Shapes, inputs: tuple[Tensor, ...]) -> None:
        """Capture the function for these shapes. One thread captures at a time; others may replay their graphs."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        pool = torch.cuda.graph_pool_handle() if self._pool is None or self._pool in _FAILED_GRAPHS else self._pool
        with CAPTURE_LOCK, _without_inference_mode(), _without_garbage_collection():
            try:
                buffers = tuple(value.clone() for value in inputs)
                torch.cuda.synchronize()
                _clear_cublas_workspaces()
                # Not torch's default capture stream, which may belong to another device.
                capture_stream = cuda_streams(torch.cuda.current_device()).capture
                with torch.cuda.graph(graph, pool=pool, stream=capture_stream, capture_error_mode="thread_local"):
                    outputs = self._function(*buffers)
            except RuntimeError as error:
                _FAILED_GRAPHS[pool] = graph
                _clean_up_capture(stream, pool)
                self._disable_capture(shapes, error)
                return
        self._graphs[shapes] = _Graph(graph, buffers, outputs, stream)

    def _disable_capture(self, shapes: Shapes, error: RuntimeError) -> None:
        """Continue without a graph: for these shapes if memory ran out, else for all shapes."""
        if isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__ from None
        if isinstance(error, torch.OutOfMemoryError) or isinstance(error.__context__, torch.OutOfMemoryError):
            self._too_large.add(shapes)
        else:
            self._is_impossible = True
        log.warning("continuing without a CUDA graph: %s", first_line(error))

    def clear_buffers(self) -> None:
        """Overwrite the inputs and outputs of the last call, which the graphs still hold, with zeros."""
        for graph in self._graphs.values():
            for value in (*graph.inputs, *(graph.outputs or [])):
                value.zero_()


@dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    outputs: list[Tensor] | None
    stream: torch.cuda.Stream  # of the last replay


def _replay(graph: _Graph, inputs: tuple[Tensor, ...]) -> list[Tensor] | None:
    stream = torch.cuda.current_stream()
    if stream != graph.stream:  # the last replay, perhaps by another thread, may still be reading the inputs
        stream.wait_stream(graph.stream)
        graph.stream = stream
    _copy(inputs, graph.inputs)
    graph.graph.replay()
    if graph.outputs is None:
        return None
    outputs = [torch.empty_like(value) for value in graph.outputs]
    _copy(graph.outputs, outputs)
    return outputs


def _copy(values: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy values to targets, with one launch if they have one type."""
    if targets:
        torch._foreach_copy_(list(targets), list(values))  # pyright: ignore[reportPrivateImportUsage]


@contextmanager
def _without_inference_mode() -> Iterator[None]:
    """Leave the caller's inference mode: tensors made in it could not be written to outside of it."""
    is_grad_enabled = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(is_grad_enabled):
        yield


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Pause garbage collection: destroying another graph would invalidate the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _clear_cublas_workspaces() -> None:
    """Make the next graph allocate its own cuBLAS workspace: torch 2.12 to 2.14 free a stream's with any graph."""
    if (2, 12) <= tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15):
        torch._C._cuda_clearCublasWorkspaces()  # pyright: ignore


def _clean_up_capture(stream: torch.cuda.Stream, pool: Any) -> None:
    """Undo a failed capture: return to the stream, stop allocating from the pool, allow random draws again."""
    torch.cuda.set_stream(stream)
    with suppress(RuntimeError, AttributeError):
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)  # pyright: ignore
    with suppress(RuntimeError):  # there may be no memory left even for this
        torch.cuda.synchronize()
        counter, capture_stream = torch.zeros(1, device="cuda"), cuda_streams(torch.cuda.current_device()).capture
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=capture_stream, capture_error_mode="thread_local"):
            counter.add_(1)  # the random generator leaves capture mode only when a capture succeeds


class Streams(NamedTuple):
    """The streams of one GPU beside its main one.

    They are few and kept, since libraries hold memory for every stream they have worked on (cuBLAS 32 MiB).
    """

    warmup: torch.cuda.Stream  # for calls before a capture
    capture: torch.cuda.Stream
    branches: tuple[torch.cuda.Stream, ...]  # for networks that run concurrently in a capture
    side: torch.cuda.Stream  # see `SideStream`


def cuda_streams(device: int) -> Streams:
    """Return the streams of a GPU, the same ones each time."""
    with STREAMS_LOCK:
        return _make_streams(device)


@lru_cache
def _make_streams(device: int) -> Streams:
    warmup, capture, side, *branches = (torch.cuda.Stream(device) for _ in range(3 + NUM_BRANCHES))
    return Streams(warmup, capture, tuple(branches), side)


class SideStream:
    """A second stream for work that runs concurrently with the main stream.

    It holds the tensors that its work reads until the main stream has waited for it, so that nothing overwrites them.
    """

    def __init__(self, device: torch.device):
        self._stream = cuda_streams(torch.cuda.current_device() if device.index is None else device.index).side
        self._held: list[Tensor] = []
        self._is_busy = False

    def start(self, work: Callable[[], Result], *reads: Tensor) -> Result:
        """Start work that reads these tensors, once the main stream has computed them."""
        self._is_busy = True
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = work()
        self._held += reads
        if sum(tensor.nbytes for tensor in self._held) > MAX_HELD_BYTES:
            self.join()
        return result

    def join(self) -> None:
        """Make the main stream wait for all work started here.

        It waits only if there is any: a capture must not wait for work that is not part of it.
        """
        if self._is_busy:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._is_busy = False
        self._held.clear()


class SameStream:
    """The counterpart of `SideStream` on other devices: work runs at once."""

    def start(self, work: Callable[[], Result], *reads: Tensor) -> Result:
        """Run the work."""
        return work()

    def join(self) -> None:
        """Do nothing: no work is pending."""


@lru_cache
def side_stream(device: torch.device) -> SideStream | SameStream:
    """Return the side stream of a GPU, or a `SameStream` for other devices."""
    return SideStream(device) if device.type == "cuda" else SameStream()


def compile_method(method: Any) -> Any:
    """Return a method compiled for the first shapes it is called with, into kernels that always give the same bits.

    The method gets its own code object, since torch.compile counts compilations per code object and stops at eight.
    """
    from torch._inductor import list_options

    function = method.__func__
    code = function.__code__.replace()
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    options: Any = {"deterministic": True, "combo_kernels": True}
    supported = {name: value for name, value in options.items() if name in list_options()}
    return torch.compile(MethodType(copy, method.__self__), dynamic=False, options=supported)
