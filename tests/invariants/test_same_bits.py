"""Invariant 5: the same seed gives the same bits, whatever the caller does with generators, precision and dtypes."""

import random
from contextlib import nullcontext

import numpy as np
import torch

import cps
from cps.runtime.devices import full_precision
from samples import DropoutNet, conv_net, make_task


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(make_learner):
    def run(seed):
        learner = make_learner(seed=seed)
        learner.learn(make_task(0))
        return learner.fingerprint(0)

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_learning_does_not_change_the_global_generator(make_learner):
    learner = make_learner(DropoutNet())
    state = torch.random.get_rng_state()
    learner.learn(make_task(0))
    assert torch.equal(state, torch.random.get_rng_state())


class Augmenting(torch.utils.data.Dataset):
    """A dataset that augments with the global generators of NumPy and Python."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        noise = np.random.randn(2, 6, 6) + random.random()
        return torch.full((2, 6, 6), index % 2) + 0.1 * torch.from_numpy(noise).float(), index % 2


def test_a_dataset_that_augments_by_numpy_or_python_gives_the_same_bits_for_the_same_seed(make_learner):
    fingerprints = []
    for seed in (0, 0, 1):
        np.random.seed(len(fingerprints))  # the state that the program left must not matter
        before = np.random.get_state()[1].copy(), random.getstate()
        learner = make_learner(seed=seed)
        learner.learn(cps.Task([0, 1], train=Augmenting()))
        fingerprints.append(learner.fingerprint(0).tensors)
        assert (np.random.get_state()[1] == before[0]).all()
        assert random.getstate() == before[1]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


def test_bf16_training_gives_the_same_bits_inside_any_autocast():
    """Autocast caches casts of weights, and a cached cast must not be used after a step has changed the weight."""

    def learn(context):
        torch.manual_seed(0)
        training, losses = cps.Training(12, cps.Adam(1e-2), batch_size=16), []
        fabric = cps.make_fabric(accelerator="cpu", precision="bf16-mixed")
        learner = cps.Learner(conv_net(), rounds=1, train=training, retrain=training, fabric=fabric)
        learner.on_epoch = lambda progress: losses.append(progress.loss)
        with context:
            learner.learn(make_task(0))
        assert losses[-1] < 0.1 * losses[0]
        return learner.fingerprint(0)

    expected = learn(nullcontext())
    for context in (torch.autocast("cpu", enabled=False), torch.autocast("cpu", torch.bfloat16)):
        assert learn(context) == expected


def test_the_callers_autocast_and_default_dtype_do_not_affect_the_network(make_learner, caplog):
    outside, inside = make_learner(), make_learner()
    outside.learn(make_task(0))
    before = outside.fingerprint(0)
    with torch.autocast(outside.network.device.type, torch.bfloat16):
        assert outside.fingerprint(0) == before
        inside.learn(make_task(0))
    assert inside.fingerprint(0) == before
    torch.set_default_dtype(torch.float64)
    try:
        learner = make_learner(conv_net().float())
        tasks = [make_task(first) for first in (0, 10)]
        for task in tasks:
            learner.learn(cps.Task(task.classes, (task.train[0].float(), task.train[1])))
        images = tasks[0].test[0].float()
        prediction = learner.predict(images, reject=0.1)
        assert prediction.share.dtype == prediction.confidence.dtype == torch.float32
        assert learner.stream().predict(images).tasks.shape == (len(images),)
        expected = learner.evidence(images)[0].logits
        with full_precision():
            torch.testing.assert_close(learner.extract(0)(images.to(expected.device)), expected, rtol=1e-3, atol=1e-4)
    finally:
        torch.set_default_dtype(torch.float32)
    assert "without" not in caplog.text  # as in "continuing without a CUDA graph"
    assert learner.network.subnetworks[0].head["weight"].dtype == torch.float32
