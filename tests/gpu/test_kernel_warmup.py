"""Kernels are compiled in parallel before their first launch, and once for batches of every size."""

from contextvars import ContextVar

import pytest
import torch

from cps.training.cuda.kernel_warmup import compile_in_parallel, launch


class Kernel:
    """Stands in for a Triton kernel; records its launches and compilations."""

    def __init__(self):
        self.launched, self.compiled = [], []

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.launched.append((grid, arguments, options))

    def warmup(self, *arguments, grid, **options):
        self.compiled.append((grid, arguments, options))


@pytest.fixture
def kernel():
    pytest.importorskip("triton")
    return Kernel()


def test_a_kernel_is_launched_with_its_arguments(kernel):
    signal = torch.zeros(3)
    launch(kernel, (2,), signal, 5, num_warps=8)
    assert kernel.launched == [((2,), (signal, 5), {"num_warps": 8})]
    assert not kernel.compiled


def test_inside_the_block_nothing_is_launched_and_each_kind_is_compiled_once(kernel):
    with compile_in_parallel():
        launch(kernel, (2,), torch.zeros(3), 5)
        launch(kernel, (2,), torch.ones(4), 5)  # the same kind
        launch(kernel, (2,), torch.zeros(3), 6)
        launch(kernel, (2,), torch.zeros(3).bfloat16(), 5)
        launch(kernel, (2,), torch.zeros(3), 5, num_warps=8)
        assert not kernel.compiled  # only at the end of the block
    assert not kernel.launched
    assert [(arguments, options) for _, arguments, options in kernel.compiled] == [
        ((torch.float32, 5), {}),
        ((torch.float32, 6), {}),
        ((torch.bfloat16, 5), {}),
        ((torch.float32, 5), {"num_warps": 8}),
    ]
    launch(kernel, (2,), 7)
    assert len(kernel.launched) == 1


def test_after_an_error_kernels_are_launched_again(kernel):
    def fail():
        with compile_in_parallel():
            launch(kernel, (1,), 1)
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        fail()
    launch(kernel, (1,), 1)
    assert len(kernel.launched) == 1
    assert not kernel.compiled


def test_a_failed_compilation_does_not_change_the_context_of_the_caller(kernel, monkeypatch):
    """The Triton of torch 2.11 stays in its compile mode after an error, and no kernel could be launched any more."""
    import triton

    mode = ContextVar("mode", default=None)

    class CompileMode:
        def __init__(self, threads):
            mode.set(threads)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            raise RuntimeError("no compiler")

    monkeypatch.setattr(triton, "AsyncCompileMode", CompileMode, raising=False)
    with pytest.raises(RuntimeError, match="no compiler"), compile_in_parallel():
        launch(kernel, (1,), 1)
    assert mode.get() is None


def constants(monkeypatch, images, step):
    """Return the compile-time constants of the kernels of a step."""
    import cps.training.cuda.conv_kernels
    import cps.training.cuda.norms
    import cps.training.cuda.strided_conv_kernels

    found = set()

    def record(kernel, grid, *arguments, **options):
        values = zip(kernel.params, arguments, strict=True)
        found.add((kernel.__name__, *(value for place, value in values if place.is_constexpr), *options.items()))

    monkeypatch.setattr(cps.training.cuda.conv_kernels, "launch", record)
    monkeypatch.setattr(cps.training.cuda.norms, "launch", record)
    monkeypatch.setattr(cps.training.cuda.strided_conv_kernels, "launch", record)
    step(images)
    return found


@pytest.mark.parametrize("size", [4, 8, 16, 32])
@pytest.mark.parametrize("channels", [24, 48, 88, 176, 512])
def test_a_smaller_last_batch_needs_no_further_kernels(monkeypatch, size, channels):
    pytest.importorskip("triton")
    from cps.training.cuda.conv_kernels import convolve, input_gradient, weight_gradient_parts
    from cps.training.cuda.norms import RunningStatistics, normalize, normalize_backward
    from cps.training.cuda.strided_conv_kernels import strided_input_gradient

    weight = torch.randn(channels, channels, 3, 3).contiguous(memory_format=torch.channels_last)
    each, count = torch.zeros(channels), torch.zeros((), dtype=torch.long)

    def step(images):
        out = convolve(images, weight, 1, 1)
        weight_gradient_parts(images, out, 3, 1, 1)
        input_gradient(out, weight, 1)
        strided_input_gradient(out, weight, (2 * out.shape[2], 2 * out.shape[3]), 2, 1)
        done = normalize(
            out, each, each, RunningStatistics(each, each, count, 0.1), each, 1e-5, shortcut=None, has_relu=True
        )
        normalize_backward([out], done, out, each, each, each, has_shortcut=False, has_relu=True)

    whole, other = torch.empty(128, channels, size, size), torch.empty(128, channels, size // 2, size // 2)
    expected = constants(monkeypatch, whole, step)
    assert len(expected) == 8
    assert constants(monkeypatch, whole[:8], step) == expected
    assert constants(monkeypatch, whole[:77], step) == expected
    assert constants(monkeypatch, other, step) != expected  # the negative control: images of another size do
