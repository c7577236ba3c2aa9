"""Weight aligning."""

import pytest
import torch
import torch.nn.functional as F
from method_samples import MEMORY, QUICK

import cps
from cps.methods.blocks.distillation import distillation_loss
from cps.methods.blocks.teacher import Teacher
from cps.methods.replay.weight_aligning import DistilledLoss, WeightAligning
from cps.network.classifier import Classifier
from samples import conv_net, make_task


def test_it_keeps_the_contract_of_methods(fabric):
    cps.check_method(lambda backbone: WeightAligning(backbone, train=QUICK, memory=MEMORY, fabric=fabric))


def test_the_loss_weighs_distillation_by_the_share_of_old_classes():
    torch.manual_seed(0)
    student, old = (Classifier(conv_net(), torch.nn.Linear(12, 5)) for _ in range(2))
    pixels, labels = torch.randn(6, 2, 6, 6), torch.arange(6) % 5
    loss = DistilledLoss(student, Teacher(old), 3, 0.6, 2.0)(pixels, labels, cps.CrossEntropy())
    logits, targets = student(pixels), old.eval()(pixels)
    expected = 0.4 * F.cross_entropy(logits, labels) + 0.6 * distillation_loss(logits[:, :3], targets[:, :3], 2.0)
    torch.testing.assert_close(loss, expected)


def test_after_every_task_but_the_first_old_and_new_weights_have_the_same_mean_length(fabric):
    method = WeightAligning(conv_net(), train=QUICK, memory=MEMORY, fabric=fabric)
    for index in range(3):
        method.learn(make_task(10 * index))
        lengths = method.model.head.weight.norm(dim=1).detach()
        if index:
            assert lengths[:-2].mean().item() == pytest.approx(lengths[-2:].mean().item())
    assert method.kept(learning=True)["teacher"] == method.kept()["weights"]
