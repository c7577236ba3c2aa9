"""LwF: the distillation of old classes on new images."""

import pytest
import torch
import torch.nn.functional as F
from method_samples import QUICK, learn_two_tasks, make, same_trajectory

import cps
from cps.methods.blocks.distillation import distillation_loss
from cps.methods.blocks.teacher import Teacher
from cps.methods.regularization.lwf import DistilledOldClasses, LwF
from cps.methods.regularization.separate_heads import SeparateHeads
from cps.network.classifier import Classifier
from samples import conv_net, make_task


def test_it_keeps_the_contract_of_methods(fabric):
    cps.check_method(lambda backbone: LwF(backbone, train=QUICK, fabric=fabric))


def test_the_loss_is_that_of_the_new_classes_plus_the_distillation_of_the_old_ones():
    torch.manual_seed(0)
    student, old = (Classifier(conv_net(), torch.nn.Linear(12, 5)) for _ in range(2))
    pixels, labels = torch.randn(6, 2, 6, 6), torch.arange(6) % 2 + 3
    loss = DistilledOldClasses(student, Teacher(old), 3, 3, 0.7, 2.0)(pixels, labels, cps.CrossEntropy())
    logits, targets = student(pixels), old.eval()(pixels)
    expected = F.cross_entropy(logits[:, 3:], labels - 3) + 0.7 * distillation_loss(logits[:, :3], targets[:, :3], 2.0)
    torch.testing.assert_close(loss, expected)


def test_without_distillation_and_with_a_fixed_head_it_is_finetuning_of_separate_heads_to_the_bit(fabric):
    tasks, plain = [make_task(10 * index) for index in range(3)], make(SeparateHeads, fabric)
    assert same_trajectory(make(LwF, fabric, strength=0.0, fixed_head=True), plain, tasks)
    assert not same_trajectory(make(LwF, fabric, fixed_head=True), make(SeparateHeads, fabric), tasks)


@pytest.mark.parametrize("fixed", [True, False])
def test_weights_of_old_classes_stay_to_the_bit_if_the_head_is_fixed(fabric, fixed):
    train = cps.Training(2, cps.SGD(0.1, weight_decay=0.1), batch_size=16)
    method = make(LwF, fabric, train=train, fixed_head=fixed)
    method.learn(make_task(0))
    rows = method.model.head.weight.detach().clone()
    method.learn(make_task(10))
    assert torch.equal(method.model.head.weight[:2], rows) == fixed


def test_it_holds_old_scores_and_learns_the_new_task(fabric):
    train = cps.Training(10, cps.Adam(1e-2), batch_size=16)
    free, _ = learn_two_tasks(make(SeparateHeads, fabric, train=train))
    held, accuracy = learn_two_tasks(make(LwF, fabric, train=train))
    assert held < free / 2
    assert accuracy > 0.8


def test_it_keeps_nothing_but_the_model_and_a_teacher_while_it_learns(fabric):
    method = make(LwF, fabric)
    method.learn(make_task(0))
    assert set(method.kept()) == {"weights"}
    assert method.kept(learning=True)["teacher"] == method.kept()["weights"]
