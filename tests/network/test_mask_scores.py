"""When few weights are free, a task learns which sealed weights to use, and changes none of them."""

import math

import pytest
import torch
from torch import nn

import cps
from cps.network.mask_scores import update_scores
from cps.training import checkpoint
from cps.training.trainer import Trainer
from samples import conv_net, make_task

LONG = cps.Training(20, cps.Adam(1e-2), cps.Cosine(), batch_size=16)
KEEP_ALL = cps.NNrelief(alpha=1.0)


@pytest.fixture
def make_full(make_learner):
    """Return a function that makes a learner whose first task has taken all weights."""

    def make(backbone=None, *, is_full=True, **settings):
        learner = make_learner(backbone, pruner=KEEP_ALL, train=LONG, **settings)
        learner.learn(make_task(0, classes=6, images=96))
        assert (learner.network.free_share() < 0.05) == is_full
        return learner

    return make


def accuracy(learner, task):
    images, labels = task.test
    index = len(learner.network.subnetworks) - 1
    found = learner.predict(images, task=index).classes
    return sum(a == b for a, b in zip(found, labels, strict=True)) / len(labels)


@pytest.mark.filterwarnings("ignore::cps.CapacityWarning")
def test_learning_which_sealed_weights_to_use_beats_using_all(make_full):
    """The backbone has neither biases nor norm layers, so besides the head only the masks can be learned."""

    def bare():
        torch.manual_seed(1)
        return nn.Sequential(nn.Flatten(), nn.Linear(72, 16, bias=False), nn.ReLU(), nn.Linear(16, 8, bias=False))

    task = make_task(50, classes=4, images=96, test=200, seed=3)
    masked = make_full(bare())
    before = masked.fingerprint(0)
    masked.learn(task)
    assert masked.fingerprint(0) == before
    assert masked.network.density(1) < 0.9
    whole = make_full(nn.Sequential(bare(), Scale()), capacity=cps.Capacity(min_free=0.0))
    whole.learn(task)
    assert whole.network.density(1) == 1.0
    assert accuracy(masked, task) > accuracy(whole, task) + 0.03


class Scale(nn.Module):
    """One trainable number, so that the network always has something to learn."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, features):
        return self.factor * features


def test_a_full_network_without_private_parameters_learns_masks_unless_min_free_is_zero(make_full):
    def bare():
        return nn.Sequential(nn.Flatten(), nn.Linear(72, 8, bias=False), nn.ReLU())

    with pytest.warns(cps.CapacityWarning, match="learns which sealed weights to use"):
        make_full(bare()).learn(make_task(10))
    with pytest.raises(cps.CapacityError, match="no free weights"):
        make_full(bare(), capacity=cps.Capacity(min_free=0.0)).learn(make_task(10))


def test_mask_scores_exist_only_if_few_weights_are_free(make_learner):
    learner = make_learner(pruner=cps.Magnitude(0.5))
    learner.learn(make_task(0))
    draft = learner.network.new_draft([10, 11], 12, torch.Generator(), min_free=learner.config.capacity.min_free)
    assert draft.scores == {}
    draft = learner.network.new_draft([10, 11], 12, torch.Generator(), min_free=1.0)
    assert set(draft.scores) == set(learner.network.weights)


def half_unused():
    """Return a network with a layer that no task can fill, since half of its inputs are always zero."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.ZeroPad1d((0, 72)), nn.Linear(144, 8), nn.ReLU(), nn.Linear(8, 16))


def test_one_full_layer_is_enough_to_learn_masks(make_full):
    learner = make_full(half_unused(), is_full=False)
    assert learner.network.free_share() > 0.4
    assert learner.network.free_by_layer()["4.weight"] == 0
    with pytest.warns(cps.CapacityWarning, match="learns which sealed weights to use"):
        learner.learn(make_task(10))
    assert learner.network.subnetworks[1].masks["4.weight"].float().mean() < 1


def test_frozen_weights_do_not_count_as_missing_capacity(make_learner):
    backbone = conv_net()
    backbone[3].weight.requires_grad_(False)
    learner = make_learner(backbone, pruner=cps.Magnitude(0.5))
    learner.learn(make_task(0))
    assert learner.network.free_share() < 0.2
    assert learner.network.new_draft([10, 11], 12, torch.Generator(), min_free=0.05).scores == {}


def stop_learning(learner, task, path, *, after):
    """Interrupt the dense training of a task after some epochs."""

    def stop(progress):
        if (progress.phase, progress.epoch) == (0, after):
            raise KeyboardInterrupt

    learner.on_epoch = stop
    with pytest.raises(KeyboardInterrupt):
        learner.learn(task, checkpoint=path)
    learner.on_epoch = None


@pytest.mark.filterwarnings("ignore::cps.CapacityWarning")
def test_mask_scores_resume_from_a_checkpoint_to_the_same_bits(make_full, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "MAX_WRITING_SHARE", math.inf)
    whole = make_full()
    whole.learn(make_task(10))
    stopped = make_full()
    stop_learning(stopped, make_task(10), tmp_path / "c", after=7)
    stopped.learn(make_task(10), checkpoint=tmp_path / "c")
    assert stopped.fingerprint(1) == whole.fingerprint(1)
    assert 0 < whole.network.density(1) < 1


@pytest.mark.filterwarnings("ignore::cps.CapacityWarning")
@pytest.mark.parametrize("learns_masks", [True, False])
def test_a_checkpoint_decides_whether_mask_scores_are_learned(make_full, tmp_path, monkeypatch, learns_masks):
    monkeypatch.setattr(checkpoint, "MAX_WRITING_SHARE", math.inf)
    monkeypatch.setattr("cps.network.shared.is_short_of_weights", lambda *_: learns_masks)
    whole, stopped = make_full(), make_full()
    whole.learn(make_task(10))
    stop_learning(stopped, make_task(10), tmp_path / "c", after=2)
    monkeypatch.setattr("cps.network.shared.is_short_of_weights", lambda *_: not learns_masks)
    stopped.learn(make_task(10), checkpoint=tmp_path / "c")
    assert stopped.fingerprint(1) == whole.fingerprint(1)


def test_a_score_moves_down_the_gradient_of_its_connection():
    """Compared with autograd: the gradient of a factor of 0 or 1 that multiplies each kernel."""
    torch.manual_seed(0)
    layer, images = nn.Conv2d(3, 4, 3, bias=False), torch.randn(5, 3, 6, 6)
    sealed = layer.weight.detach().clone()
    switch = (torch.rand(4, 3, 1, 1) < 0.7).float().requires_grad_()
    nn.functional.conv2d(images, sealed * switch).square().sum().backward()
    with torch.no_grad():
        layer.weight.mul_(switch)
    layer(images).square().sum().backward()
    scores, usable = torch.ones(4, 3, 1, 1), torch.ones(4, 3, 1, 1, dtype=torch.bool)
    usable[0, 0] = False
    update_scores(scores, layer.weight.grad, sealed, usable, 0.5)
    gradient = switch.grad * usable
    expected = 1 - 0.5 * gradient / (gradient.square().sum() / 11).sqrt()
    torch.testing.assert_close(scores, expected)
    assert scores[0, 0] == 1


def test_a_gradient_that_overflows_moves_no_score():
    """In half precision the optimizer skips such a step, so the scores must too."""
    sealed, usable = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bool)
    for bad in (torch.inf, torch.nan):
        scores, gradient = torch.ones(2, 2), torch.ones(2, 2)
        gradient[0, 0] = bad
        update_scores(scores, gradient, sealed, usable, 0.5)
        assert torch.equal(scores, torch.ones(2, 2))
    update_scores(scores, torch.ones(2, 2), sealed, usable, 0.5)  # the negative control
    assert torch.equal(scores, torch.full((2, 2), 0.5))


def test_scores_change_only_in_dense_training(make_full, monkeypatch):
    """After pruning the masks are fixed: what is retrained is what will be sealed."""
    ranges = []
    real = Trainer.fit
    monkeypatch.setattr(
        Trainer, "fit", lambda *args, **settings: ranges.append(settings["score_range"]) or real(*args, **settings)
    )
    learner = make_full()
    learner.learn(make_task(10))
    assert [score_range > 0 for score_range in ranges] == [True, False, True, False]
