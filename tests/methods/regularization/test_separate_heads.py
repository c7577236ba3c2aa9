"""Finetuning with a softmax for each task."""

import pytest
import torch
from method_samples import MEMORY, QUICK, make, same_trajectory

import cps
from cps.methods.finetuning import Finetuning
from cps.methods.regularization.separate_heads import LossFrom, SeparateHeads
from cps.methods.replay.experience_replay import ExperienceReplay
from cps.network.classifier import Classifier
from cps.selection.softmax_mass import SoftmaxMass
from samples import conv_net, make_task


def test_it_keeps_the_contract_of_methods(fabric):
    cps.check_method(lambda backbone: SeparateHeads(backbone, train=QUICK, fabric=fabric))


def test_the_loss_is_that_of_the_new_classes_alone():
    torch.manual_seed(0)
    model, pixels, labels = Classifier(conv_net(), torch.nn.Linear(12, 5)), torch.randn(6, 2, 6, 6), torch.arange(6) % 2
    loss = LossFrom(model, 3)(pixels, labels + 3, cps.CrossEntropy())
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(model(pixels)[:, 3:], labels))


def test_weights_of_old_classes_stay_to_the_bit_with_momentum_and_decay(fabric):
    train = cps.Training(2, cps.SGD(0.1, weight_decay=0.1), batch_size=16)
    method, other = make(SeparateHeads, fabric, train=train), make(Finetuning, fabric, train=train)
    for each in (method, other):
        each.learn(make_task(0))
    rows = method.model.head.weight.detach().clone()
    for each in (method, other):
        each.learn(make_task(10))
    assert torch.equal(method.model.head.weight[:2], rows)
    assert not torch.equal(other.model.head.weight[:2], rows)
    assert not torch.equal(method.model.head.weight[2:], rows)


def test_the_first_task_is_finetuning_and_with_a_memory_all_tasks_are_experience_replay(fabric):
    tasks = [make_task(10 * index) for index in range(3)]
    assert same_trajectory(make(SeparateHeads, fabric), make(Finetuning, fabric), tasks[:1])
    assert not same_trajectory(make(SeparateHeads, fabric), make(Finetuning, fabric), tasks[:2])
    methods = [make(kind, fabric, memory=MEMORY) for kind in (SeparateHeads, ExperienceReplay)]
    assert same_trajectory(*methods, tasks)
    assert methods[0].assumes.replay


@pytest.mark.parametrize(("memory", "expected"), [(None, cps.MaxOutput()), (MEMORY, SoftmaxMass())])
def test_groups_use_a_common_softmax_only_if_it_was_trained(fabric, memory, expected):
    assert make(SeparateHeads, fabric, memory=memory).group_selector == expected
