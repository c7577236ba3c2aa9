"""Launch Triton kernels, and compile them in parallel before the first launch."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any

from torch import Tensor

from cps.runtime.process_state import PENDING_KERNELS

TYPICAL_BATCH = 128  # images; block sizes are chosen for this batch size


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: int) -> None:
    """Launch a kernel; inside `compile_in_parallel`, only note it for compilation."""
    if not PENDING_KERNELS:
        kernel[grid](*arguments, **options)
        return
    kinds = tuple(value.dtype if isinstance(value, Tensor) else value for value in arguments)
    key = (id(kernel), kinds, *options.items())
    PENDING_KERNELS[-1][key] = partial(kernel.warmup, *kinds, grid=grid, **options)


@contextmanager
def compile_in_parallel() -> Iterator[None]:
    """Launch no kernel inside the block; at its end, compile all that would have been launched.

    The tensors that the kernels would write to stay unchanged.
    """
    PENDING_KERNELS.append({})
    try:
        yield
    finally:
        kernels = PENDING_KERNELS.pop()
    if kernels:  # in a separate context, since some versions of Triton stay in the compile mode after an error
        copy_context().run(_compile, list(kernels.values()))


def _compile(kernels: list[Callable[[], object]]) -> None:
    import triton  # installed only with GPU builds of torch

    compile_mode = getattr(triton, "AsyncCompileMode", None)
    if compile_mode is None:  # an old Triton: each kernel is compiled at its first launch
        return
    with ThreadPoolExecutor() as threads, compile_mode(threads):
        for kernel in kernels:
            kernel()
