"""Batches on the device are those of the plan, and can be erased."""

import pytest
import torch

import cps
from cps.data.batch_transform import BatchTransform
from cps.data.examples import TensorExamples
from cps.training.cuda.device_batches import DeviceBatches
from gpu.helpers import needs_gpu, odd_resnet
from samples import make_task

TRANSFORM = BatchTransform(augment=cps.Flip())


@pytest.fixture
def examples():
    return TensorExamples(torch.rand(10, 3, 4, 4), torch.arange(10))


def test_batches_are_read_in_the_order_of_the_epoch_with_their_own_random_numbers(examples):
    order, uniform = torch.randperm(10), torch.rand(10, TRANSFORM.draws)
    batches = DeviceBatches(examples, TRANSFORM)
    batches.load(examples)
    for _ in range(2):  # a second epoch starts from the beginning
        batches.start_epoch(order, uniform)
        for indices in order.split(4):
            found = batches.read(len(indices))
            expected = TRANSFORM(examples.images[indices], examples.targets[indices], uniform[indices])
            assert all(map(torch.equal, found, expected))


def test_a_stored_batch_keeps_its_address(examples):
    batches = DeviceBatches(examples, TRANSFORM)
    first, second = ((torch.rand(4, 3, 4, 4), torch.arange(4)) for _ in range(2))
    batches.store(4, first)
    pixels, _ = batches.stored(4)
    batches.store(4, second)
    assert batches.stored(4)[0] is pixels
    assert torch.equal(pixels, second[0])


def test_only_examples_of_the_same_shape_and_dtype_fit(examples):
    batches = DeviceBatches(examples, TRANSFORM)
    assert batches.fits(examples)
    assert not batches.fits(TensorExamples(examples.images[:5], examples.targets[:5]))
    assert not batches.fits(TensorExamples(examples.images.double(), examples.targets))


def test_clearing_leaves_no_image(examples):
    batches = DeviceBatches(examples, TRANSFORM)
    batches.load(examples)
    batches.start_epoch(torch.arange(10), torch.rand(10, TRANSFORM.draws))
    batches.store(4, batches.read(4))
    assert batches.stored(4)[0].any()
    batches.clear()
    assert not batches._images.any()
    assert not any(value.any() for value in batches.stored(4))


@needs_gpu
def test_images_that_do_not_fit_stay_on_the_host_and_train_to_the_same_bits(make_learner, monkeypatch, caplog):
    import cps.data.examples

    def run():
        torch.manual_seed(0)
        learner = make_learner(odd_resnet(), augment=cps.Flip())
        learner.learn(make_task(0, shape=(3, 8, 8)))
        return learner.fingerprint(0)

    resident = run()
    monkeypatch.setattr(cps.data.examples, "_fits_on_gpu", lambda *_: False)
    assert run() == resident
    assert "stay in the host's memory" in caplog.text
