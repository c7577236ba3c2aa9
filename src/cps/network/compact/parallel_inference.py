"""The crowd: many small networks look at the same pixels at once.

On a CPU each network and stretch of images is a job of one thread, since layers this small gain little from several.
On a GPU the networks run side by side on streams of their own, all captured as one graph, in half precision where that
rounds no more than a GPU does anyway. Whatever else is in the crowd, a network computes the same bits.
"""

import copy
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from threading import Barrier
from typing import Protocol

import torch
from torch import Tensor, nn

from cps.network.compact.channel_padding import padded
from cps.network.outputs import Outputs, are_close, concatenate, pair_outputs
from cps.network.partition import in_channels_last, put_channels_last
from cps.runtime.cuda_graphs import Captured
from cps.runtime.cuda_streams import streams_of
from cps.runtime.devices import deterministic_cudnn, full_precision

STRETCH = 32  # images in one job of a CPU, each look at one counted
LAUNCH = 3 * 2**18  # numbers of pixels in one launch on a GPU, likewise: of 256 images at 32 x 32, of 5 at 224 x 224
ROUNDING = 2e-3  # of the largest feature; as much as convolutions on a GPU round by default


class Branch(Protocol):
    """A network with its head."""

    def look(self, pixels: Tensor) -> Tensor:
        """Return features of pixels."""
        ...

    def say(self, seen: Tensor) -> Outputs:
        """Return the outputs for what was seen."""
        ...


class ParallelInference:
    """Small networks on one device, each with its head; calling it returns the outputs of each.

    `looks` is how often all of them look at an image.
    """

    def __init__(self, networks: Sequence[Branch], views: int = 1):
        self.networks, self.views = list(networks), views
        self._captured = Captured(partial(_on_gpu, self.networks))  # not of itself: its graphs go when it does

    @torch.no_grad()
    def __call__(self, pixels: Tensor) -> list[Outputs]:
        """Return what each network says about these pixels."""
        pixels = in_channels_last(pixels)
        with deterministic_cudnn():
            return self._in_launches(pixels) if pixels.is_cuda else self._on_cpu(pixels)

    def _on_cpu(self, pixels: Tensor) -> list[Outputs]:
        stretches = pixels.split(max(1, STRETCH // self.views))
        jobs = [(network, stretch) for network in self.networks for stretch in stretches]
        done = list(_workers(torch.get_num_threads(), os.getpid()).map(_run, jobs))
        return [concatenate(done[start : start + len(stretches)]) for start in range(0, len(done), len(stretches))]

    def _in_launches(self, pixels: Tensor) -> list[Outputs]:
        """Let all networks look at so many images at once that the memory of a usual GPU holds what they see."""
        stretches = pixels.split(max(1, LAUNCH // (self.views * pixels[:1].numel())))
        found = [pair_outputs(self._captured(stretch)) for stretch in stretches]  # by stretch and network
        return [concatenate(of_one) for of_one in zip(*found, strict=True)]


def _on_gpu(networks: Sequence[Branch], pixels: Tensor) -> list[Tensor]:
    """Return features and logits of each network in turn; a capture records what they see side by side."""
    is_recorded = torch.cuda.is_current_stream_capturing()
    seen = _side_by_side(networks, pixels) if is_recorded else [network.look(pixels) for network in networks]
    return [part for network, features in zip(networks, seen, strict=True) for part in network.say(features)]


def _side_by_side(networks: Sequence[Branch], pixels: Tensor) -> list[Tensor]:
    main, beside = torch.cuda.current_stream(), streams_of(torch.cuda.current_device()).beside
    seen = []
    for index, network in enumerate(networks):
        stream = beside[index % len(beside)]
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            seen.append(network.look(pixels))
    for stream in beside[: len(networks)]:
        main.wait_stream(stream)
    return seen


class Half(nn.Module):
    """A network that computes in half precision and returns features in full."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.inner = copy.deepcopy(network).half()

    def forward(self, pixels: Tensor) -> Tensor:
        """Return features, shape (N, d)."""
        return self.inner(pixels.half()).float()


@torch.no_grad()
def fastest_form(network: nn.Module, pixels: Tensor) -> nn.Module:
    """Return a small network in the form that its device runs fastest; `pixels` are some to try it on."""
    if not pixels.is_cuda:
        return put_channels_last(copy.deepcopy(network))
    twin = put_channels_last(padded(network, pixels, least=4) or copy.deepcopy(network))
    return to_half(twin, pixels) or twin


@torch.no_grad()
def to_half(network: nn.Module, pixels: Tensor) -> Half | None:
    """Return the network in half precision, or None where its features would not be the same but for rounding."""
    if pixels.dtype != torch.float32:
        return None
    with full_precision():
        expected = network(pixels)
    half = Half(network)
    try:
        return half if are_close(half(pixels), expected, ROUNDING) else None
    except RuntimeError:  # an operation that does not know halves
        return None


@torch.no_grad()
def _run(job: tuple[Branch, Tensor]) -> Outputs:
    network, pixels = job
    return network.say(network.look(pixels))


@lru_cache
def _workers(number: int, process: int) -> ThreadPoolExecutor:
    """Return as many workers as there are threads, each of which uses one; a process that was forked has its own."""
    pool = ThreadPoolExecutor(number, "cps", initializer=partial(torch.set_num_threads, 1))
    everybody = Barrier(number)
    list(pool.map(lambda _: everybody.wait(), range(number)))  # all have started ...
    torch.set_num_threads(number)  # ... so that threads of others, started later, have as many as before
    return pool
