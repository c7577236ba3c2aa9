"""LwM: the distillation of attention maps."""

import pytest
import torch
from method_samples import QUICK, learn_two_tasks, make, same_trajectory
from torch import nn

import cps
from cps.methods.blocks.teacher import Teacher
from cps.methods.regularization.attention import attention_distance
from cps.methods.regularization.lwf import DistilledOldClasses, LwF
from cps.methods.regularization.lwm import DistilledAttention, LwM, teacher_attention
from cps.methods.regularization.separate_heads import SeparateHeads
from cps.network.classifier import Classifier
from samples import conv_net, make_task

IMAGES = torch.randn(6, 2, 6, 6, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(6) % 2 + 3


def classifier(seed=0):
    torch.manual_seed(seed)
    return Classifier(conv_net(), nn.Linear(12, 5)).eval()


def attention_term(student, teacher):
    """Return the objective without its other terms: those of LwF are taken away."""
    lwf = DistilledOldClasses(student, Teacher(teacher), 3, 3, 1.0, 2.0)
    loss = cps.CrossEntropy()
    return DistilledAttention(lwf, "4", 1.0)(IMAGES, LABELS, loss) - lwf(IMAGES, LABELS, loss)


def test_it_keeps_the_contract_of_methods(fabric):
    cps.check_method(lambda backbone: LwM(backbone, train=QUICK, fabric=fabric))


def test_a_student_like_its_teacher_has_no_attention_loss_and_another_one_has():
    assert attention_term(classifier(), classifier()).item() == pytest.approx(0, abs=1e-6)
    assert attention_term(classifier(), classifier(1)).item() > 0.1


def test_the_attention_loss_is_that_of_each_image_for_its_own_best_old_class():
    """Worked from the pooled features: the score of class c is sum_k w_ck mean(A_k), so a_k = w_ck / pixels."""
    student, teacher = classifier(), classifier(1)
    with torch.no_grad():
        teacher.head.bias -= teacher(IMAGES).mean(dim=0)
    total, best = 0.0, teacher(IMAGES)[:, :3].argmax(dim=1)
    assert len(best.unique()) > 1
    for image, label in zip(IMAGES, best, strict=True):
        maps = [model.backbone[:5](image[None])[0] for model in (student, teacher)]  # (12, 3, 3)
        seen = [torch.einsum("k,khw->hw", model.head.weight[label] / 9, each).relu() for model, each in zip((student, teacher), maps, strict=True)]  # fmt: skip
        total += attention_distance(*((each / each.norm()).flatten()[None] for each in seen))
    torch.testing.assert_close(attention_term(student, teacher), total / 6, rtol=1e-4, atol=1e-5)


def test_the_attention_loss_has_gradients_in_the_backbone_and_in_the_head():
    student = classifier()
    attention_term(student, classifier(1)).backward()
    assert student.backbone[0].weight.grad.abs().max() > 1e-4
    assert student.head.weight.grad[:3].abs().max() > 1e-4  # the channel weights of the maps are differentiated, too


def test_the_teacher_has_maps_although_it_has_no_gradients():
    teacher = Teacher(classifier())
    best, logits, seen = teacher_attention(teacher, IMAGES, "4", 3)
    assert torch.equal(logits, teacher(IMAGES))
    assert torch.equal(best, logits[:, :3].argmax(dim=1))
    assert seen.shape == (6, 9)
    assert not seen.requires_grad
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_without_the_attention_term_it_is_lwf_to_the_bit(fabric):
    tasks = [make_task(10 * index) for index in range(2)]
    assert same_trajectory(make(LwM, fabric, attention=0.0), make(LwF, fabric), tasks)
    assert not same_trajectory(make(LwM, fabric), make(LwF, fabric), tasks)


def test_it_holds_old_scores_and_learns_the_new_task(fabric):
    train = cps.Training(10, cps.Adam(1e-2), batch_size=16)
    free, _ = learn_two_tasks(make(SeparateHeads, fabric, train=train))
    held, accuracy = learn_two_tasks(make(LwM, fabric, train=train))
    assert held < free / 2
    assert accuracy > 0.8


def test_a_backbone_without_maps_is_refused_and_nothing_changes(fabric):
    method = LwM(nn.Sequential(nn.Flatten(), nn.Linear(72, 4)), train=QUICK, fabric=fabric)
    method.learn(make_task(0))
    with pytest.raises(ValueError, match="need a backbone with convolutions"):
        method.learn(make_task(10))
    assert method.classes == [(0, 1)]
