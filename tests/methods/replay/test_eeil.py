"""EEIL: distillation of each task, balanced training and noise."""

import pytest
import torch
import torch.nn.functional as F
from method_samples import MEMORY, ONE_EPOCH, QUICK, make, same_trajectory

import cps
from cps.methods.blocks.distillation import distillation_loss
from cps.methods.blocks.gradient_noise import GradientNoise
from cps.methods.blocks.memory import Memory
from cps.methods.blocks.teacher import Teacher
from cps.methods.finetuning import Finetuning
from cps.methods.replay.eeil import EEIL, DistilledTasks
from cps.network.classifier import Classifier
from samples import conv_net, make_task


def test_it_keeps_the_contract_of_methods(fabric):
    cps.check_method(lambda backbone: EEIL(backbone, train=QUICK, balance=ONE_EPOCH, memory=MEMORY, fabric=fabric))


def classifiers(number):
    torch.manual_seed(0)
    return [Classifier(conv_net(), torch.nn.Linear(12, 7)).eval() for _ in range(number)]


def test_every_earlier_task_has_a_softmax_and_the_new_classes_have_one_in_the_balanced_phase():
    student, old, before = classifiers(3)
    pixels, labels = torch.randn(8, 2, 6, 6), torch.arange(8) % 7
    logits, targets, last = student(pixels), old(pixels), before(pixels)
    expected = F.cross_entropy(logits, labels)
    expected = expected + distillation_loss(logits[:, :3], targets[:, :3])
    expected = expected + distillation_loss(logits[:, 3:5], targets[:, 3:5])
    main = DistilledTasks(student, [3, 2], 2.0, Teacher(old))
    torch.testing.assert_close(main(pixels, labels, cps.CrossEntropy()), expected)
    balanced = DistilledTasks(student, [3, 2], 2.0, Teacher(old), Teacher(before))
    expected = expected + distillation_loss(logits[:, 5:], last[:, 5:])
    torch.testing.assert_close(balanced(pixels, labels, cps.CrossEntropy()), expected)


def test_the_term_of_the_new_classes_has_no_gradient_at_the_start_of_the_balanced_phase():
    (student,) = classifiers(1)
    pixels, labels = torch.randn(8, 2, 6, 6), torch.arange(8) % 2 + 5
    gradients = []
    for before in (None, Teacher(student)):
        student.zero_grad()
        DistilledTasks(student, [3, 2], 2.0, None, before)(pixels, labels, cps.CrossEntropy()).backward()
        gradients.append(student.head.weight.grad.clone())
    torch.testing.assert_close(*gradients)


def test_without_noise_the_first_task_is_finetuning_to_the_bit_and_with_noise_it_is_not(fabric):
    settings = {"memory": MEMORY, "balance": QUICK}
    plain, tasks = make(Finetuning, fabric), [make_task(0)]
    assert same_trajectory(make(EEIL, fabric, noise=None, **settings), plain, tasks)
    methods = [make(EEIL, fabric, **settings) for _ in range(2)]
    assert same_trajectory(*methods, tasks)
    assert not same_trajectory(make(EEIL, fabric, **settings), make(Finetuning, fabric), tasks)


def test_noise_is_another_one_in_each_step_and_epoch():
    (student,) = classifiers(1)
    objective, found = DistilledTasks(student, [], 2.0, None, noise=GradientNoise(), seed=(3,)), []
    for epoch in (0, 1, 0):
        objective.before_epoch(epoch)
        for _ in range(2):
            student.head.bias.grad = torch.zeros(7)
            objective.before_step()
            found.append(student.head.bias.grad)
    assert torch.equal(found[0], found[4])
    assert torch.equal(found[1], found[5])
    assert not any(torch.equal(found[0], other) for other in found[1:4])


@pytest.mark.parametrize(("memory", "phases"), [(MEMORY, {"training", "balanced training"}), (Memory(0), {"training"})])
def test_the_balanced_phase_needs_images_of_old_classes(fabric, memory, phases):
    method, seen = make(EEIL, fabric, memory=memory, balance=QUICK), []
    method.learn(make_task(0), on_epoch=lambda at: seen.append((0, at.phase_name)))
    method.learn(make_task(10), on_epoch=lambda at: seen.append((1, at.phase_name)))
    assert {name for task, name in seen if task == 0} == {"training"}
    assert {name for task, name in seen if task == 1} == phases


def test_with_a_budget_both_phases_together_see_its_images(fabric):
    method = make(EEIL, fabric, memory=MEMORY, balance=QUICK, passes=4)
    for index in range(2):
        before = method.image_passes
        method.learn(make_task(10 * index))
        assert 4 * 24 <= method.image_passes - before < 4 * 24 + 2 * QUICK.batch_size


def test_it_remembers_what_finetuning_forgets(fabric):
    tasks = [make_task(10 * index, images=48) for index in range(3)]
    train, balance = (cps.Training(epochs, cps.Adam(rate), batch_size=16) for epochs, rate in ((10, 1e-2), (5, 1e-3)))
    method = make(EEIL, fabric, memory=Memory(30), train=train, balance=balance)
    for task in tasks:
        method.learn(task)
    images, labels = tasks[0].test
    assert sum(a == b for a, b in zip(method.predict(images).classes, labels, strict=True)) > 9
