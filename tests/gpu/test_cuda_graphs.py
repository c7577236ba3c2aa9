"""Captured functions on a GPU; what needs none is in tests/runtime/test_cuda_graphs.py."""

import threading

import torch
from torch import nn

from cps.runtime.cuda_graphs import CapturedFunction
from cps.runtime.seeding import seeded
from gpu.helpers import needs_gpu


@needs_gpu
def test_a_failed_capture_leaves_the_gpu_as_it_was(caplog):
    def uncapturable(values):
        return [values * float(values.sum().item())]  # waits for the GPU

    pool = torch.cuda.graph_pool_handle()
    function, double = CapturedFunction(uncapturable, pool), CapturedFunction(lambda values: [values * 2], pool)
    ones = torch.ones(4, device="cuda")
    for _ in range(2):  # a second failure is handled as the first
        assert [float(function(ones)[0].sum()) for _ in range(6)] == [16.0] * 6
        function._is_impossible = False
    assert caplog.text.count("without a CUDA graph: CUDA error") == 2
    torch.cuda.empty_cache()
    nn.functional.dropout(ones)
    assert [float(double(ones)[0].sum()) for _ in range(6)] == [8.0] * 6
    assert len(double._graphs) == 1
    before = torch.cuda.memory_reserved()
    torch.zeros(2**26, device="cuda")
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before  # memory allocated later can be released


@needs_gpu
def test_nothing_is_captured_while_another_thread_may_draw_random_numbers():
    double, ones = CapturedFunction(lambda values: [values * 2]), torch.ones(4, device="cuda")
    has_begun, may_end = threading.Event(), threading.Event()

    def draw():
        with seeded(torch.device("cuda", 0), 0):
            has_begun.set()
            while not may_end.wait(0.001):
                nn.functional.dropout(ones)

    other = threading.Thread(target=draw)
    other.start()
    has_begun.wait()
    assert [float(double(ones)[0].sum()) for _ in range(6)] == [8.0] * 6
    assert not double._graphs
    may_end.set()
    other.join()
    assert [float(double(ones)[0].sum()) for _ in range(3)] == [8.0] * 3
    assert len(double._graphs) == 1


@needs_gpu
def test_threads_with_streams_of_their_own_can_share_a_graph():
    def slow(values):
        for _ in range(100):
            values = values + 1  # slow enough for the threads to overlap
        return [values]

    function, wrong = CapturedFunction(slow), []

    def call(factor):
        values = torch.linspace(0, factor, 2**20, device="cuda")
        (expected,) = slow(values)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            found = [function(values)[0] for _ in range(50)]
            torch.cuda.current_stream().synchronize()
            wrong.extend(one for one in found if not torch.equal(one, expected))

    threads = [threading.Thread(target=call, args=(factor,)) for factor in (1.0, 2.0, 4.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert function._graphs
    assert not wrong
