"""Steps to the mean of where each task leads, compared with the equation and with plain steps."""

import copy

import pytest
import torch
from torch import nn

import cps
from cps.data.batch_transform import BatchTransform
from cps.data.examples import TensorExamples
from cps.methods.replay.itaml import OwnTaskSigmoids
from cps.methods.replay.per_task_steps import PerTaskSteps
from cps.network.classifier import Classifier
from cps.training.trainer import Trainer

TASKS = torch.tensor([0, 0, 1, 1])  # of four classes
IMAGES, LABELS = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 4


def make(tasks=TASKS):
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh())
    return OwnTaskSigmoids(Classifier(backbone, nn.Linear(5, 4)), tasks)


def train(model, fabric, optimizer, labels=LABELS, *, batch_size=12, epochs=1, **settings):
    """Train with per-task steps, or with plain ones if there are no settings."""
    model = model.to(fabric.device)
    training = cps.Training(epochs, optimizer, cps.Constant(), batch_size=batch_size)
    options = {}
    if settings:
        settings = {"inner_steps": 1, "in_sequence": False, **settings}
        options["make_steps"] = lambda fit, fabric: PerTaskSteps(fit, fabric, model.task_of_class, **settings)
    examples = TensorExamples(IMAGES[: len(labels)], labels)
    Trainer(fabric).fit(model, examples, training, seed=(0,), transform=BatchTransform(), **options)
    return dict(model.student.named_parameters())


def gradient(model, task, training=True):
    own = TASKS[LABELS] == task
    model.train(training).zero_grad()
    model(IMAGES[own], LABELS[own], None).backward()
    return {name: value.grad.clone() for name, value in model.student.named_parameters()}


def test_one_step_of_sgd_for_two_tasks_is_one_along_their_mean_gradient(fabric):
    start, both = make(), make()
    gradients = [gradient(start, task) for task in (0, 1)]
    reached = train(both, fabric, cps.SGD(0.1, momentum=0.0, weight_decay=0.0), rate=0.9)
    for name, before in start.student.named_parameters():
        expected = before - 0.9 * 0.1 * (gradients[0][name] + gradients[1][name]) / 2
        torch.testing.assert_close(reached[name].cpu(), expected, rtol=0, atol=1e-6)


def test_in_sequence_the_second_gradient_is_taken_where_the_first_step_ends(fabric):
    start, both = make(), make()
    reached = train(both, fabric, cps.SGD(0.1, momentum=0.0, weight_decay=0.0), rate=0.5, in_sequence=True)
    there = copy.deepcopy(start)
    for task in (0, 1):
        for name, value in gradient(there, task).items():
            there.student.get_parameter(name).data -= 0.1 * value
    for name, before in start.student.named_parameters():
        expected = (before + there.student.get_parameter(name)) / 2
        torch.testing.assert_close(reached[name].cpu(), expected, rtol=0, atol=1e-6)


def test_steps_of_a_half_and_a_quarter_lead_to_their_mean_or_in_sequence_to_their_sum():
    """From 1: 0.5 and 0.75 have the mean 0.625; in sequence 0.25 is reached."""

    class Pull(OwnTaskSigmoids):
        def forward(self, pixels, labels, loss):
            return self.student.weight.sum() * torch.tensor([0.5, 0.25])[labels[0]]

    for in_sequence, expected in ((False, 0.625), (True, 0.25)):
        student = nn.Linear(1, 1, bias=False)
        nn.init.ones_(student.weight)
        model = Pull(student, torch.tensor([0, 1]))
        labels = torch.tensor([0, 0, 1, 1])
        optimizer = cps.SGD(1.0, momentum=0.0, weight_decay=0.0)
        train(model, cps.make_fabric(accelerator="cpu"), optimizer, labels, rate=1.0, in_sequence=in_sequence)
        assert student.weight.item() == pytest.approx(expected)


@pytest.mark.parametrize("optimizer", [cps.SGD(0.1), cps.Adam(1e-2), cps.RAdam(1e-2)])
def test_with_one_task_and_rate_one_the_steps_are_plain_ones_to_the_bit(fabric, optimizer):
    plain, apart = make(torch.zeros(4).long()), make(torch.zeros(4).long())
    train(plain, fabric, optimizer, batch_size=5, epochs=3)
    train(apart, fabric, optimizer, batch_size=5, epochs=3, rate=1.0)
    torch.testing.assert_close(apart.state_dict(), plain.state_dict(), rtol=0, atol=0)


def test_with_momentum_the_steps_follow_the_mean_of_the_losses(fabric):
    """The mean of the states of the optimizer is that of one optimizer with the mean gradient."""
    apart, mean = make(), make().to(fabric.device)
    train(apart, fabric, cps.SGD(0.1, weight_decay=0.01), epochs=4, rate=1.0)
    optimizer = torch.optim.SGD(mean.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for _ in range(4):
        gradients = [gradient(mean, task) for task in (0, 1)]
        for name, parameter in mean.student.named_parameters():
            parameter.grad = (gradients[0][name] + gradients[1][name]) / 2
        optimizer.step()
    torch.testing.assert_close(dict(apart.named_parameters()), dict(mean.named_parameters()))


def test_a_rate_of_zero_moves_no_parameter(fabric):
    model = make()
    before = {name: value.detach().clone() for name, value in model.student.named_parameters()}
    torch.testing.assert_close(train(model, fabric, cps.Adam(1e-2), rate=0.0), before, rtol=0, atol=0)


def test_a_task_with_one_image_in_a_batch_is_left_out(fabric):
    labels = torch.tensor([0, 1, 0, 1, 2])
    both, alone = make(), make(torch.tensor([0, 0, 0, 0]))
    optimizer = cps.SGD(0.1)
    reached = train(both, fabric, optimizer, labels, rate=1.0)
    own = OwnTaskSigmoids(alone.student, TASKS)
    expected = train(own, fabric, optimizer, labels[:4], batch_size=4)
    torch.testing.assert_close(reached, expected)


def test_inner_steps_are_steps_of_the_optimizer_on_the_same_images(fabric):
    twice, plain = make(torch.zeros(4).long()), make(torch.zeros(4).long())
    train(twice, fabric, cps.SGD(0.1), rate=1.0, inner_steps=2)
    train(plain, fabric, cps.SGD(0.1), epochs=2)  # all images are one batch
    torch.testing.assert_close(dict(twice.named_parameters()), dict(plain.named_parameters()))
