"""Finetuning forgets, and resumes after an interruption."""

import math

import pytest
import torch

import cps
from cps.methods.finetuning import Finetuning
from cps.methods.single_head import SingleHeadTrainer
from cps.training import checkpoint
from samples import conv_net, make_task


def make_method(fabric, tasks, on_epoch=None):
    torch.manual_seed(0)
    training = cps.Training(2, cps.Adam(1e-2), batch_size=16)
    return Finetuning(SingleHeadTrainer(conv_net(), tasks, training, fabric=fabric, on_epoch=on_epoch))


def test_finetuning_forgets_earlier_tasks(fabric):
    tasks = [make_task(10 * index, images=96) for index in range(3)]
    training = cps.Training(20, cps.Adam(1e-2), batch_size=16)
    torch.manual_seed(0)
    metrics = Finetuning(SingleHeadTrainer(conv_net(), tasks, training, fabric=fabric)).run()
    assert metrics.accuracy.shape == (3, 3)
    assert metrics.accuracy.diagonal().min() > 90
    assert metrics.BWT > 50


def test_interrupted_finetuning_resumes_to_the_same_result(tmp_path, fabric, monkeypatch):
    monkeypatch.setattr(checkpoint, "MAX_WRITING_SHARE", math.inf)  # epochs this short would be skipped
    tasks = [make_task(10 * index) for index in range(3)]

    def interrupt(phase, epoch):
        if (phase, epoch.done) == (2, 1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_method(fabric, tasks, interrupt).run(tmp_path / "c")
    resumed = []
    metrics = make_method(fabric, tasks, lambda phase, epoch: resumed.append((phase, epoch.done))).run(tmp_path / "c")
    assert resumed == [(2, 2)]
    assert metrics == make_method(fabric, tasks).run()
