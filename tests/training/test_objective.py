"""Objectives train a student beside frozen modules, with the guard and the loop of the library."""

import copy

import pytest
import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins import MixedPrecision
from torch import nn

import cps
from cps.data.batch_transform import BatchTransform
from cps.data.examples import TensorExamples
from cps.network.classifier import Classifier
from cps.network.freezing import Protected
from cps.training.objective import Objective
from cps.training.steps import PlainSteps
from cps.training.trainer import Trainer

IMAGES, LABELS = torch.randn(24, 3, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 2


class NearTeacher(Objective):
    """The loss plus the squared distance of the features to those of a frozen copy."""

    def __init__(self, student, teacher):
        super().__init__(student)
        self.teacher = teacher.requires_grad_(False)
        self.events, self.epochs = [], []

    def forward(self, pixels, labels, loss):
        features = self.student.backbone(pixels)
        distance = (features - self.teacher(pixels)).pow(2).mean()
        return loss(features, self.student.head(features), labels) + distance

    def before_epoch(self, epoch):
        self.epochs.append(epoch)

    def before_step(self):
        assert all(parameter.grad is not None for parameter in self.student.parameters())
        self.events.append(("before", self.student.head.weight[0, 0].item()))

    def after_step(self):
        self.events.append(("after", self.student.head.weight[0, 0].item()))


def make_student():
    torch.manual_seed(0)
    return Classifier(nn.Linear(3, 4), nn.Linear(4, 2))


def fit(model, fabric, *, epochs=2, guard=None, images=None, start=0, schedule=None, make_steps=None, passes=1):
    training = cps.Training(epochs, cps.SGD(0.1), schedule or cps.Constant(), batch_size=8)
    trainer = Trainer(fabric)
    examples = TensorExamples(IMAGES, LABELS)
    trainer.fit(
        model, examples, training, seed=(0,), transform=BatchTransform(), guard=guard, images=images, start=start,
        make_steps=make_steps, passes_per_batch=passes,
    )  # fmt: skip
    return trainer


def test_the_student_is_trained_and_the_teacher_stays(fabric):
    teacher = nn.Linear(3, 4)
    before, student = copy.deepcopy(teacher.state_dict()), make_student()
    fit(NearTeacher(student, teacher).to(fabric.device), fabric)
    torch.testing.assert_close(teacher.cpu().state_dict(), before, rtol=0, atol=0)
    alone = make_student()
    fit(alone.to(fabric.device), fabric)
    assert not torch.equal(student.backbone.weight, alone.backbone.weight)  # the teacher has had an influence


def test_a_guard_names_the_parameters_of_the_student(fabric):
    student = make_student().to(fabric.device)
    sealed = student.head.weight.detach().clone()
    taken = torch.tensor([[True] * 4, [False] * 4], device=fabric.device)
    guard = {"head.weight": Protected(taken, sealed, torch.zeros_like(taken))}
    objective = NearTeacher(student, nn.Linear(3, 4).to(fabric.device))
    fit(objective, fabric, guard=guard)
    assert torch.equal(student.head.weight[0], sealed[0])
    assert not torch.equal(student.head.weight[1], sealed[1])
    assert {value for _, value in objective.events} == {sealed[0, 0].item()}  # restored before `after_step`


def test_each_step_calls_the_objective_before_and_after_it(fabric):
    objective = NearTeacher(make_student(), nn.Linear(3, 4)).to(fabric.device)
    fit(objective, fabric, epochs=1)
    names, values = zip(*objective.events, strict=True)
    assert names == ("before", "after") * 3
    assert values[1] == values[2] != values[0]


def test_before_a_step_the_gradients_are_those_of_the_loss_also_where_precision_scales_them():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    gradients = []
    for each in (fabric, Fabric(accelerator="cpu", devices=1)):
        objective = NearTeacher(make_student(), nn.Linear(3, 4))
        objective.before_step = lambda student=objective.student: gradients.append(student.head.weight.grad.clone())
        fit(objective, each, epochs=1)
    assert scaler.get_scale() == 1024
    torch.testing.assert_close(gradients[0], gradients[3], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(("start", "expected"), [(0, [0, 1, 2]), (1, [1, 2])])
def test_an_objective_knows_the_epoch_also_after_resuming(fabric, start, expected):
    objective = NearTeacher(make_student(), nn.Linear(3, 4)).to(fabric.device)
    fit(objective, fabric, epochs=3, start=start)
    assert objective.epochs == expected


@pytest.mark.parametrize(("images", "expected"), [(40, 40), (41, 48), (8, 8), (48, 48), (0, 0)])
def test_training_ends_with_the_batch_that_reaches_the_number_of_images(fabric, images, expected):
    lengths = []

    def schedule(epoch, epochs):
        lengths.append((epoch, epochs))
        return 1.0

    assert (
        fit(make_student().to(fabric.device), fabric, epochs=99, images=images, schedule=schedule).image_passes
        == expected
    )
    assert len(lengths) == expected // 8
    assert all(epoch < epochs == images / 24 for epoch, epochs in lengths)


@pytest.mark.parametrize("images", [None, 40])
def test_image_passes_count_the_epochs_that_an_earlier_process_has_trained(fabric, images):
    whole = fit(make_student().to(fabric.device), fabric, images=images)
    resumed = fit(make_student().to(fabric.device), fabric, images=images, start=1)
    skipped = fit(make_student().to(fabric.device), fabric, images=images, start=2)
    assert whole.image_passes == resumed.image_passes == skipped.image_passes == (images or 48)


def test_other_steps_can_replace_the_plain_ones(fabric):
    class TwiceAsMany(PlainSteps):
        def _step(self, batch, loss_weight, score_step):
            super()._step(batch, loss_weight, score_step)
            super()._step(batch, loss_weight, score_step)

    def twice_as_many(fit, fabric):
        return TwiceAsMany(fit.model, fit.training, fabric, fit.transform)

    objective = NearTeacher(make_student(), nn.Linear(3, 4)).to(fabric.device)
    trainer = fit(objective, fabric, epochs=1, make_steps=twice_as_many, passes=2)
    assert len(objective.events) == 12
    assert trainer.image_passes == 48
    objective.events.clear()
    trainer = fit(objective, fabric, epochs=99, images=80, make_steps=twice_as_many, passes=2)
    assert trainer.image_passes == 80
    assert len(objective.events) == 4 * 80 // 16


def test_an_objective_can_choose_its_optimizer(fabric):
    class SlowHead(NearTeacher):
        def make_optimizer(self, training):
            slow = training.optimizer(self.student.head.parameters())
            slow.param_groups[0]["lr"] = 0.0
            slow.add_param_group({"params": self.student.backbone.parameters(), "lr": 0.1})
            return slow

    student = make_student().to(fabric.device)
    before = {name: value.clone() for name, value in student.state_dict().items()}
    fit(SlowHead(student, nn.Linear(3, 4)).to(fabric.device), fabric)
    assert torch.equal(student.head.weight, before["head.weight"])
    assert not torch.equal(student.backbone.weight, before["backbone.weight"])
