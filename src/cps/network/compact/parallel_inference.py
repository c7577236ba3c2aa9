"""Run several compact subnetworks on one batch concurrently.

On a CPU each network and chunk of images is a job of one thread, since layers this small gain little from several
threads. On a GPU the networks run on separate streams that are captured as one CUDA graph, in half precision where
that rounds no more than a GPU's convolutions do by default. A network computes the same bits whichever networks run
with it.
"""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, fx, nn

from cps.network.compact.channel_padding import pad_channels
from cps.network.compact.in_place import work_in_place
from cps.network.outputs import Outputs, are_close, concatenate, pair_outputs
from cps.network.partition import as_channels_last, put_channels_last
from cps.runtime.cuda_graphs import CapturedFunction, cuda_streams
from cps.runtime.devices import deterministic_cudnn, full_precision
from cps.runtime.process_state import thread_pool

CHUNK_IMAGES = 32  # images in one job on a CPU, every view counted
BATCH_VALUES = 3 * 2**18  # values in one batch on a GPU, every view counted: 256 images of 32 x 32, 5 of 224 x 224
HALF_TOLERANCE = 2e-3  # of the largest feature: as much as a GPU's convolutions round by default


class Branch(Protocol):
    """A compact network with its head."""

    def view_features(self, pixels: Tensor) -> Tensor:
        """Return the features of every view of the pixels."""
        ...

    def outputs(self, features: Tensor) -> Outputs:
        """Return features and logits, averaged over the views."""
        ...


class ParallelInference:
    """Several branches on one device; calling it returns the outputs of each.

    `num_views` is the number of views of an image that every branch computes.
    """

    def __init__(self, branches: Sequence[Branch], num_views: int = 1):
        self.branches, self.num_views = list(branches), num_views
        # The function must not refer to `self`: without a reference cycle the graphs are freed together with it.
        self._captured = CapturedFunction(partial(_run_branches, self.branches))

    @torch.no_grad()
    def __call__(self, pixels: Tensor) -> list[Outputs]:
        """Return the outputs of each branch for the pixels."""
        pixels = as_channels_last(pixels)
        with deterministic_cudnn():
            return self._run_on_gpu(pixels) if pixels.is_cuda else self._run_on_cpu(pixels)

    def _run_on_cpu(self, pixels: Tensor) -> list[Outputs]:
        chunks = pixels.split(max(1, CHUNK_IMAGES // self.num_views))
        jobs = [(branch, chunk) for branch in self.branches for chunk in chunks]
        done = _run_jobs(jobs)
        return [concatenate(done[start : start + len(chunks)]) for start in range(0, len(done), len(chunks))]

    def _run_on_gpu(self, pixels: Tensor) -> list[Outputs]:
        """Run all branches on batches small enough for the memory of an ordinary GPU."""
        batches = pixels.split(max(1, BATCH_VALUES // (self.num_views * pixels[:1].numel())))
        outputs = [pair_outputs(self._captured(batch)) for batch in batches]  # by batch, then by branch
        return [concatenate(of_branch) for of_branch in zip(*outputs, strict=True)]


@torch.no_grad()
def run_each(branches: Sequence[tuple[Branch, int, Tensor]]) -> list[Outputs]:
    """Return the outputs of each branch for pixels of its own, given as (branch, number of its views, pixels)."""
    if not branches:
        return []
    if branches[0][2].is_cuda:
        with deterministic_cudnn():
            return [_run_job((branch, as_channels_last(pixels))) for branch, _, pixels in branches]
    parts = [as_channels_last(pixels).split(max(1, CHUNK_IMAGES // views)) for _, views, pixels in branches]
    jobs = [(branch, part) for (branch, *_), chunks in zip(branches, parts, strict=True) for part in chunks]
    done = iter(_run_jobs(jobs))
    return [concatenate([next(done) for _ in chunks]) for chunks in parts]


def _run_branches(branches: Sequence[Branch], pixels: Tensor) -> list[Tensor]:
    """Return features and logits of each branch in turn; a capture records them on parallel streams."""
    is_capturing = torch.cuda.is_current_stream_capturing()
    features = (
        _features_on_streams(branches, pixels)
        if is_capturing
        else [branch.view_features(pixels) for branch in branches]
    )
    return [part for branch, own in zip(branches, features, strict=True) for part in branch.outputs(own)]


def _features_on_streams(branches: Sequence[Branch], pixels: Tensor) -> list[Tensor]:
    """Return the features of each branch, computed on several CUDA streams at once."""
    main, streams = torch.cuda.current_stream(), cuda_streams(torch.cuda.current_device()).branches
    features = []
    for index, branch in enumerate(branches):
        stream = streams[index % len(streams)]
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            features.append(branch.view_features(pixels))
    for stream in streams[: len(branches)]:
        main.wait_stream(stream)
    return features


def _run_jobs(jobs: Sequence[tuple[Branch, Tensor]]) -> list[Outputs]:
    """Run jobs on as many workers as torch has threads; a single worker would only wait for another thread."""
    if torch.get_num_threads() == 1:
        return [_run_job(job) for job in jobs]
    return list(thread_pool().map(_run_job, jobs))


@torch.no_grad()
def _run_job(job: tuple[Branch, Tensor]) -> Outputs:
    branch, pixels = job
    return branch.outputs(branch.view_features(pixels))


class HalfPrecision(nn.Module):
    """A copy of a network that computes in half precision and returns float32 features."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.inner = copy.deepcopy(network).half()

    def forward(self, pixels: Tensor) -> Tensor:
        """Return features, shape (N, d)."""
        return self.inner(pixels.half()).float()


@torch.no_grad()
def convert_for_device(network: fx.GraphModule, pixels: Tensor) -> nn.Module:
    """Return a copy of a compact network in the form that runs fastest on the device of `pixels`.

    `pixels` are images on which the copy is compared with the network.
    """
    if not pixels.is_cuda:
        return put_channels_last(work_in_place(copy.deepcopy(network)))
    converted = put_channels_last(pad_channels(network, pixels, min_channels=4) or copy.deepcopy(network))
    return to_half(converted, pixels) or converted


@torch.no_grad()
def to_half(network: nn.Module, pixels: Tensor) -> HalfPrecision | None:
    """Return a copy of the network in half precision, or None if its features differ by more than rounding."""
    if pixels.dtype != torch.float32:
        return None
    with full_precision():
        expected = network(pixels)
    half = HalfPrecision(network)
    try:
        return half if are_close(half(pixels), expected, HALF_TOLERANCE) else None
    except RuntimeError:  # an operation without a half precision implementation
        return None
