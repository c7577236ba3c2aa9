"""The crowd: many small networks look at the same pixels at once.

On a CPU each network and stretch of images is a job of one thread, since layers this small gain little from several.
On a GPU the networks run side by side on streams of their own, all captured as one graph. Whatever else is in the
crowd, a network computes the same bits.
"""

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from cps.capture import Captured
from cps.devices import same_bits
from cps.padding import padded

STRETCH = 32  # images in one job of a CPU
STREAMS = 16


class Crowd:
    """Small networks on one device; calling it returns the features of each, shape (N, d)."""

    def __init__(self, networks: Sequence[nn.Module]):
        self.networks = list(networks)
        self._streams: list[torch.cuda.Stream] = []
        self._captured = Captured(self._on_gpu)

    @torch.no_grad()
    def __call__(self, pixels: Tensor) -> list[Tensor]:
        """Return the features that each network sees in these pixels."""
        if pixels.ndim == 4:
            pixels = pixels.contiguous(memory_format=torch.channels_last)
        with same_bits():
            return self._captured(pixels) if pixels.is_cuda else self._on_cpu(pixels)

    def _on_cpu(self, pixels: Tensor) -> list[Tensor]:
        stretches = pixels.split(STRETCH)
        jobs = [(network, stretch) for network in self.networks for stretch in stretches]
        done = list(_workers(torch.get_num_threads()).map(_run, jobs))
        return [torch.cat(done[start : start + len(stretches)]) for start in range(0, len(done), len(stretches))]

    def _on_gpu(self, pixels: Tensor) -> list[Tensor]:
        main = torch.cuda.current_stream()
        if not self._streams:
            self._streams = [torch.cuda.Stream() for _ in range(min(STREAMS, len(self.networks)))]
        found = []
        for stream in self._streams:
            stream.wait_stream(main)
        for index, network in enumerate(self.networks):
            with torch.cuda.stream(self._streams[index % len(self._streams)]):
                found.append(network(pixels))
        for stream in self._streams:
            main.wait_stream(stream)
        return found


@torch.no_grad()
def member(network: nn.Module, pixels: Tensor) -> nn.Module:
    """Return a small network in the form that its device runs fastest; `pixels` are some to try it on."""
    twin = padded(network, pixels, least=4) if pixels.is_cuda else None
    return (twin or copy.deepcopy(network)).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


@torch.no_grad()
def _run(job: tuple[nn.Module, Tensor]) -> Tensor:
    network, pixels = job
    return network(pixels)


@lru_cache
def _workers(number: int) -> ThreadPoolExecutor:
    """Return as many workers as there are threads; each uses one."""
    return ThreadPoolExecutor(number, "cps", initializer=partial(torch.set_num_threads, 1))
