"""Settings of training: schedules, and errors that are raised when a setting is constructed."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

import cps
from cps.training.settings import scale_like
from samples import make_task


def test_a_further_phase_differs_from_the_main_one_by_the_same_ratios():
    main, further = cps.Training(40, cps.SGD(0.1, weight_decay=4e-4)), cps.Training(30, cps.SGD(0.01, weight_decay=0))
    found = scale_like(cps.Training(20, cps.Adam(3e-3, 5e-3), cps.Cosine(4), batch_size=32), main, further)
    assert found.epochs == 15
    assert found.optimizer.lr == pytest.approx(3e-4)
    assert found.optimizer.weight_decay == 0
    assert found.schedule == cps.Cosine(3)
    assert found.batch_size == 32


def test_schedules_are_those_of_the_paper():
    steps = cps.Steps((20, 40, 60), 0.2)
    assert [round(steps(epoch, 70), 6) for epoch in (0, 19.9, 20, 45, 69)] == [1, 1, 0.2, 0.04, 0.008]
    cosine = cps.Cosine(warmup=2)
    assert cosine(0, 10) < 0.01
    assert cosine(2, 10) == 1
    assert cosine(6, 10) == pytest.approx(0.5)
    assert cosine(10, 10) == pytest.approx(0)


def torch_scheduler():
    return lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1), 10)


@pytest.mark.parametrize(
    "loss",
    [F.cross_entropy, partial(F.cross_entropy, label_smoothing=0.1), nn.CrossEntropyLoss(), nn.functional.mse_loss],
)
def test_a_loss_of_torch_raises_and_the_message_says_how_to_wrap_it(loss):
    with pytest.raises(TypeError, match=r"lambda features, logits, labels: F.cross_entropy\(logits, labels\)"):
        cps.Training(1, loss=loss)
    wrapped = cps.Training(1, loss=lambda features, logits, labels: F.cross_entropy(logits, labels))
    assert callable(wrapped.loss)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cps.Training(1, 0.01), r"object such as cps.SGD\(0.1\), or a function of \(parameters\), got 0.01"),
        (lambda: cps.Training(1, cps.Adam), "optimizer must be an object such as"),
        (lambda: cps.Training(1, cps.Cosine()), "optimizer must be an object such as"),
        (lambda: cps.Training(1, cps.Adam(), "cosine"), r"schedule must be an object such as cps.Cosine\(\)"),
        (lambda: cps.Training(1, schedule=lambda epoch: 1.0), r"a function of \(epoch, epochs\)"),
        (
            lambda: cps.Training(1, schedule=lr_scheduler.CosineAnnealingLR),
            "a scheduler of torch belongs to one optimizer",
        ),
        (
            lambda: cps.Training(1, torch_scheduler().optimizer),
            r"got one of torch \(SGD\); pass how to make one: functools.partial\(torch.optim.SGD, lr=...\)",
        ),
        (
            lambda: cps.Training(1, schedule=torch_scheduler()),
            r"such as cps.Cosine\(\), .* a scheduler of torch belongs",
        ),
    ],
)
def test_a_wrong_optimizer_or_schedule_raises(make, message):
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cps.Adam("x"), "lr of Adam must be a finite number, got 'x'"),
        (lambda: cps.SGD(0.1, -1), "momentum of SGD must be 0 or more, got -1"),
        (lambda: cps.Training(1.5), r"epochs of Training must be an integer, got 1\.5"),
    ],
)
def test_wrong_numbers_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_losses_and_augmentations_must_have_the_right_arguments(make_learner):
    with pytest.raises(TypeError, match=r"loss must be a function of \(features, logits, labels\)"):
        cps.Training(1, loss=nn.CrossEntropyLoss())
    cps.Training(1, loss=lambda features, logits, labels: logits.sum())
    with pytest.raises(TypeError, match="an augmentation must be a function .* `draws`"):
        make_learner(augment=lambda images, uniform: images).learn(make_task(0))


def test_a_loss_with_parameters_raises():
    class Learned(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, features, logits, labels):
            return torch.nn.functional.cross_entropy(self.scale * logits, labels)

    with pytest.raises(ValueError, match="must not have parameters"):
        cps.Training(1, loss=Learned())


def test_a_subclass_of_an_optimizer_may_have_settings_that_are_not_numbers():
    @dataclass(frozen=True)
    class Nesterov(cps.SGD):
        tag: str = "mine"
        betas: tuple[float, float] = (0.9, 0.999)

    assert Nesterov(0.1).tag == "mine"
    with pytest.raises(ValueError, match="lr of Nesterov must be 0 or more"):
        Nesterov(-0.1)


def test_optimizers_accept_numpy_numbers_and_can_be_subclassed():
    assert cps.SGD(np.float32(0.5), np.int64(0)) == cps.SGD(0.5, 0)
    assert isinstance(cps.SGD(np.float32(0.5)).lr, float)

    @dataclass(frozen=True)
    class Nesterov(cps.SGD):
        nesterov: bool = True

    assert Nesterov(0.1).nesterov
