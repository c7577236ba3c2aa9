"""What of CUDA graphs, streams and compiling can be tested without a GPU; the rest: tests/gpu."""

import copy

import pytest
import torch

from cps.runtime import cuda_graphs
from cps.runtime.cuda_graphs import CapturedFunction, SameStream, compile_method, side_stream

CPU = torch.device("cpu")


def test_without_a_gpu_side_work_runs_at_once():
    stream = side_stream(CPU)
    assert isinstance(stream, SameStream)
    assert side_stream(CPU) is stream
    assert stream.start(lambda: 3, torch.ones(1)) == 3
    stream.join()


def test_a_capture_is_due_after_the_warm_up_calls_of_its_shapes():
    function, shapes = CapturedFunction(lambda values: [values]), ((2,),)
    for calls in range(1, cuda_graphs.WARMUP_CALLS + 1):
        function._num_calls[shapes] = calls
        assert function._is_due(shapes) == (calls == cuda_graphs.WARMUP_CALLS)
    function._graphs = dict.fromkeys(range(cuda_graphs.MAX_GRAPHS))
    assert not function._is_due(shapes)


@pytest.mark.parametrize(
    ("error", "is_due_for_others"), [(torch.OutOfMemoryError("large"), True), (RuntimeError("no capture"), False)]
)
def test_a_failed_capture_is_not_tried_again(error, is_due_for_others, caplog):
    function, shapes, others = CapturedFunction(lambda values: [values]), ((2,),), ((3,),)
    function._num_calls = dict.fromkeys((shapes, others), cuda_graphs.WARMUP_CALLS)
    function._disable_capture(shapes, error)
    assert not function._is_due(shapes)
    assert function._is_due(others) == is_due_for_others
    assert f"continuing without a CUDA graph: {error}" in caplog.text


def test_an_interrupted_capture_raises_the_interrupt():
    error = RuntimeError("capture failed")
    error.__context__ = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        CapturedFunction(lambda: None)._disable_capture((), error)


def test_captured_functions_can_be_copied():
    function = CapturedFunction(len)
    with function._lock:
        assert copy.deepcopy(function)._function is len


def test_garbage_collection_and_inference_mode_are_paused_and_restored():
    import gc

    with torch.inference_mode(), cuda_graphs._without_inference_mode(), cuda_graphs._without_garbage_collection():
        assert not torch.is_inference_mode_enabled()
        assert not torch.is_grad_enabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_every_instance_has_its_own_compiled_method(monkeypatch):
    """torch.compile stops after eight compilations of one code object."""
    compiled = []

    def backend(graph, _inputs):
        compiled.append(graph)
        return graph.forward

    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda work, **_: original(work, backend=backend, dynamic=False))

    class Multiplies:
        def __init__(self, factor):
            self.factor = factor

        def multiply(self, value):
            return value * self.factor

    for factor in range(12):
        assert compile_method(Multiplies(factor).multiply)(torch.ones(1)) == factor
    assert len(compiled) == 12
