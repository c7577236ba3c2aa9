"""Running compact networks together changes no bit."""

import gc
import weakref
from threading import Thread

import pytest
import torch

from cps.network.compact.parallel_inference import ParallelInference, to_half
from cps.network.outputs import Outputs
from samples import ACCELERATOR, use_all_compact

TOLERANCE = 1e-4 if ACCELERATOR == "cpu" else 3e-3  # a GPU rounds the inputs of convolutions


@pytest.mark.usefixtures("in_full_precision")
def test_subnetworks_that_run_together_compute_the_same_bits_as_each_alone(learner, images):
    use_all_compact(learner)
    batches = images.split(40)
    for _ in range(5):  # on a GPU the later calls replay a graph
        together = learner.network.outputs(batches, [0, 1])
        for task in range(2):
            alone = learner.network.outputs(batches, [task])[0]
            assert torch.equal(together[task].logits, alone.logits)
            full = learner.network.full_outputs(batches, task)
            torch.testing.assert_close(together[task].features, full.features, rtol=1e-3, atol=TOLERANCE)
    # The negative control: a replayed graph reads the new inputs.
    moved = learner.network.outputs([images + 0.1], [0, 1])
    assert not torch.equal(moved[0].logits, together[0].logits)


def test_half_precision_is_used_only_if_features_differ_by_rounding():
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten()).requires_grad_(False)
    pixels = torch.randn(2, 3, 6, 6)
    half = to_half(network, pixels)
    assert half is not None
    torch.testing.assert_close(half(pixels), network(pixels), rtol=1e-2, atol=1e-2)
    network[0].weight *= 1e5  # beyond what a half can hold
    assert to_half(network, pixels) is None
    assert to_half(network.double(), pixels.double()) is None


class Times:
    """A branch whose features are the pixels times a factor."""

    def __init__(self, factor):
        self.factor = factor

    def view_features(self, pixels):
        return self.factor * pixels.flatten(1)

    def outputs(self, features):
        return Outputs(features, -features)


def test_parallel_inference_does_not_change_the_number_of_threads_of_others():
    before, found = torch.get_num_threads(), []
    ParallelInference([Times(1)])(torch.rand(3, 1, 2, 2))
    thread = Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert found == [before]


def test_the_graphs_of_parallel_inference_are_freed_with_it_without_garbage_collection():
    parallel = ParallelInference([Times(1)])
    parallel(torch.rand(3, 1, 2, 2))
    gc.disable()
    try:
        captured = weakref.ref(parallel._captured)
        del parallel
        assert captured() is None
    finally:
        gc.enable()


def test_a_large_batch_is_split_to_fit_into_gpu_memory(monkeypatch):
    parallel, launched = ParallelInference([Times(1), Times(2)], num_views=2), []

    def launch(pixels):
        launched.append(len(pixels))
        return [part for branch in parallel.branches for part in branch.outputs(branch.view_features(pixels))]

    monkeypatch.setattr(parallel, "_captured", launch)
    monkeypatch.setattr("cps.network.compact.parallel_inference.BATCH_VALUES", 6 * 48)
    images = torch.randn(7, 3, 4, 4)
    found = parallel._run_on_gpu(images)
    assert launched == [3, 3, 1]
    for outputs, branch in zip(found, parallel.branches, strict=True):
        assert all(map(torch.equal, outputs, branch.outputs(branch.view_features(images))))
