"""Launching: kernels in Triton, compiled side by side before the first of them starts."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any

from torch import Tensor

TYPICAL = 128  # images of a batch, for which the blocks of kernels are chosen

_waiting: list[dict[Any, Callable[[], object]]] = []  # how to compile each kernel, while none may start


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: int) -> None:
    """Start a kernel."""
    if not _waiting:
        kernel[grid](*arguments, **options)
        return
    kinds = tuple(value.dtype if isinstance(value, Tensor) else value for value in arguments)
    name = (id(kernel), kinds, *options.items())
    _waiting[-1][name] = partial(kernel.warmup, *kinds, grid=grid, **options)


@contextmanager
def compiled_together() -> Iterator[None]:
    """Start no kernel inside: compile all that would start, at the same time. What they write to is left as it is."""
    _waiting.append({})
    try:
        yield
    finally:
        found = _waiting.pop()
    if found:  # in a context of its own: after an error, Triton may stay in the mode it was put into
        copy_context().run(_compile, list(found.values()))


def _compile(kernels: list[Callable[[], object]]) -> None:
    import triton  # is there only where GPUs are

    together = getattr(triton, "AsyncCompileMode", None)
    if together is None:  # an old Triton: each is compiled when it starts
        return
    with ThreadPoolExecutor() as threads, together(threads):
        for kernel in kernels:
            kernel()
