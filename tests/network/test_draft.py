"""A draft starts from the backbone's private parameters and is sealed only if its weights are finite."""

import pytest
import torch
from torch import nn

from cps.network.draft import Draft
from cps.training.trainer import Trainer
from samples import conv_net, make_task


def test_every_task_starts_from_the_private_parameters_of_the_backbone(make_learner, monkeypatch):
    backbone = conv_net()
    with torch.no_grad():
        backbone[1].weight.fill_(3.0)
        backbone[1].running_mean.fill_(0.5)
    learner = make_learner(backbone)
    learner.learn(make_task(0))
    starts = []
    original = Draft.__init__

    def record(self, *args, **kwargs):
        original(self, *args, **kwargs)
        starts.append({name: value.clone() for name, value in self.private().items()})

    monkeypatch.setattr(Draft, "__init__", record)
    learner.learn(make_task(10))
    assert starts[0]["1.weight"].eq(3.0).all()
    assert starts[0]["1.running_mean"].eq(0.5).all()


def test_weights_that_become_nan_in_the_last_step_are_not_sealed(make_learner, monkeypatch):
    learner = make_learner()
    fit = Trainer.fit

    def fit_and_break(trainer, model, *args, seed, **settings):
        fit(trainer, model, *args, seed=seed, **settings)
        if seed[-1] == learner.config.rounds:  # the last phase
            model.backbone[0].bias.data[0] = torch.nan

    monkeypatch.setattr(Trainer, "fit", fit_and_break)
    with pytest.raises(FloatingPointError, match="training left '0.bias' with NaN or infinite values; lower the"):
        learner.learn(make_task(0))
    assert learner.network.subnetworks == []


def test_a_constant_buffer_may_be_infinite(make_learner):
    class WithMask(nn.Sequential):
        def __init__(self):
            super().__init__(*conv_net())
            self.register_buffer("mask", torch.triu(torch.full((3, 3), -torch.inf), 1))

    learner = make_learner(WithMask())
    learner.learn(make_task(0))
    assert learner.network.subnetworks[0].private["mask"].isinf().any()
