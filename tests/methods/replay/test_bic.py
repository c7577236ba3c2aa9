"""BiC: held-out images and the correction of biases."""

import pytest
import torch
from method_samples import MEMORY, ONE_EPOCH, QUICK, make, same_trajectory
from torch import nn

import cps
from cps.data.batch_transform import BatchTransform
from cps.data.examples import TensorExamples
from cps.methods.blocks.bias_correction import BiasCorrection
from cps.methods.blocks.distillation import distillation_loss
from cps.methods.blocks.heads import guard_rows
from cps.methods.blocks.memory import Memory
from cps.methods.blocks.teacher import Teacher, frozen
from cps.methods.replay.bic import BiC, CorrectedClassifier, CorrectionLoss
from cps.methods.replay.weight_aligning import DistilledLoss
from cps.network.classifier import Classifier
from cps.training.trainer import Trainer
from samples import ListDataset, conv_net, make_task

CORRECT = cps.Training(3, cps.SGD(0.1, weight_decay=0.0), batch_size=16)


def bic(fabric, **settings):
    return make(BiC, fabric, **{"memory": MEMORY, "correct": CORRECT, **settings})


def test_it_keeps_the_contract_of_methods(fabric):
    cps.check_method(lambda backbone: BiC(backbone, train=QUICK, correct=ONE_EPOCH, memory=MEMORY, fabric=fabric))


def test_the_loss_distils_corrected_logits_with_the_share_of_old_classes():
    torch.manual_seed(0)
    student, old = (Classifier(conv_net(), nn.Linear(12, 5)).eval() for _ in range(2))
    correction = BiasCorrection([2, 1, 2])
    with torch.no_grad():
        correction.alpha[1], correction.beta[1] = 0.5, -1
    pixels, labels = torch.randn(6, 2, 6, 6), torch.arange(6) % 5
    teacher = Teacher(CorrectedClassifier(old, correction))
    objective = DistilledLoss(CorrectedClassifier(student, correction), teacher, 3, 0.6, 2.0)
    loss = objective(pixels, labels, cps.CrossEntropy())
    logits, targets = student(pixels).clone(), old(pixels).clone()
    for each in (logits, targets):
        each[:, 2] = 0.5 * each[:, 2] - 1
    expected = 0.4 * nn.functional.cross_entropy(logits, labels)
    torch.testing.assert_close(loss, expected + 0.6 * distillation_loss(logits[:, :3], targets[:, :3]))
    loss.backward()
    assert correction.alpha.grad is None
    assert student.head.weight.grad.abs().max() > 0


def test_a_shift_of_the_new_logits_is_found_and_the_network_stays_to_the_bit(fabric):
    """The classes 0 to 3 have logits that fit the labels; those of 2 and 3 are shifted by 3."""
    torch.manual_seed(0)
    labels = torch.arange(400) % 4
    images = nn.functional.one_hot(labels, 4) + 0.8 * torch.randn(400, 4)
    model = Classifier(nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)), nn.Linear(4, 4))
    with torch.no_grad():
        for layer in (model.backbone[0], model.head):
            layer.weight.copy_(torch.eye(4))
        model.head.weight *= 1.5  # the best scale of these logits, so alpha has nothing to do
        model.head.bias.copy_(torch.tensor([0.0, 0.0, 3.0, 3.0]))
    model.to(fabric.device)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    correction = BiasCorrection([2, 2]).to(fabric.device)
    training = cps.Training(60, cps.SGD(0.1, weight_decay=0.0), batch_size=100)
    with frozen(model) as fixed:
        Trainer(fabric).fit(
            CorrectionLoss(correction, fixed), TensorExamples(images, labels), training, seed=(0,),
            transform=BatchTransform(), guard=guard_rows(correction, 1, prefix=""),
        )  # fmt: skip
    assert correction.beta[1].item() == pytest.approx(-3, abs=0.5)
    assert correction.alpha[1].item() == pytest.approx(1, abs=0.25)
    assert (correction.alpha[0].item(), correction.beta[0].item()) == (1, 0)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_only_the_correction_of_the_last_task_changes_and_the_order_inside_it_does_not(fabric):
    method, tasks = bic(fabric), [make_task(10 * index) for index in range(3)]
    earlier = []
    for task in tasks:
        method.learn(task)
        numbers = [*zip(method.buffers["alpha"].tolist(), method.buffers["beta"].tolist(), strict=True)]
        assert numbers[:-1] == earlier
        earlier = numbers
    assert numbers[0] == (1, 0)
    assert all(number != (1, 0) for number in numbers[1:])
    images = tasks[2].test[0]
    plain = method.model.eval()(images.to(fabric.device))[:, 4:]
    assert (method.buffers["alpha"] > 0).all()
    assert torch.equal(method.evidence(images)[2].logits.argmax(dim=1), plain.argmax(dim=1))


class Counted(ListDataset):
    """A data set that counts how often each image is read while it trains."""

    def __init__(self, images, labels):
        super().__init__(images, labels)
        self.targets, self.reads = labels, torch.zeros(len(labels), dtype=torch.long)

    def __getitem__(self, index):
        self.reads[index] += 1
        return super().__getitem__(index)


def test_images_that_are_held_out_are_never_trained_on(fabric):
    method = bic(fabric, memory=Memory(24))
    held = []
    for index in range(2):
        task = make_task(10 * index)
        data, during = Counted(*task.train), []
        method.learn(
            cps.Task(task.classes, train=data),
            on_epoch=lambda at, data=data, during=during: during.append((at.phase_name, data.reads.clone())),
        )
        trained = [reads for name, reads in during if name == "training"]
        steps = trained[-1] - trained[0]  # one epoch
        kept = [next(i for i in range(24) if torch.equal(image, data.images[i])) for images in method.held_out.images[-2:] for image in images]  # fmt: skip
        assert (steps == 0).sum() >= len(kept) > 0
        assert (steps[kept] == 0).all()
        held.append(len(kept))
        seen = torch.cat(method.exemplars.images)
        assert not any(torch.equal(image, other) for image in torch.cat(method.held_out.images) for other in seen)
    assert held == [2, 2]


def test_memory_and_correction_count_as_kept_and_continue_from_a_file(fabric, tmp_path):
    method, other = (bic(fabric, memory=Memory(24)) for _ in range(2))
    method.learn(make_task(0))
    method.save(tmp_path / "method")
    other.load(tmp_path / "method")
    assert same_trajectory(method, other, [make_task(10)])
    assert torch.equal(method.evidence(make_task(0).test[0])[0].logits, other.evidence(make_task(0).test[0])[0].logits)
    assert len(method.exemplars) + len(method.held_out) == 24
    assert method.kept()["exemplars"] == 24 * 2 * 6 * 6 * 4
    assert method.kept()["statistics"] == 2 * 2 * 4


def test_a_memory_with_less_than_two_images_of_a_class_is_refused_before_the_training(fabric):
    method = bic(fabric, memory=Memory(7))
    method.learn(make_task(0))
    with pytest.raises(ValueError, match="needs two of each of 4 classes"):
        method.learn(make_task(10))
    assert method.classes == [(0, 1)]
    with pytest.raises(ValueError, match="needs two of each"):
        bic(fabric, memory=None).learn(make_task(0))


def test_it_lowers_the_logits_of_new_classes_and_remembers_what_finetuning_forgets(fabric):
    train = cps.Training(10, cps.Adam(1e-2), batch_size=16)
    correct = cps.Training(40, cps.SGD(0.1, weight_decay=0.0), batch_size=16)
    method, tasks = bic(fabric, train=train, correct=correct), [make_task(10 * index, images=48) for index in range(3)]
    for task in tasks:
        method.learn(task)
    assert (method.buffers["beta"][1:] < -0.1).all()
    images, labels = tasks[0].test
    assert sum(a == b for a, b in zip(method.predict(images).classes, labels, strict=True)) > 9
