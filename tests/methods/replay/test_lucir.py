"""LUCIR: its three terms, and what is left without two of them."""

import math

import pytest
import torch
import torch.nn.functional as F
from method_samples import LONGER, MEMORY, QUICK, right_after_three_tasks, same_trajectory

import cps
from cps.methods.blocks.memory import Memory
from cps.methods.blocks.teacher import Teacher
from cps.methods.cosine.cosine_head import make_cosine_head
from cps.methods.cosine.cosine_method import CosineMethod
from cps.methods.replay.lucir import LUCIR, LUCIRObjective
from cps.network.classifier import Classifier
from samples import conv_net, make_task


def make(kind, fabric, **settings):
    torch.manual_seed(0)
    return kind(cps.SmallConvNet(2, widths=(4, 6)), fabric=fabric, **{"train": QUICK, "memory": MEMORY, **settings})


def objective(fabric, old, new, **settings):
    torch.manual_seed(0)
    head = make_cosine_head(12, old + new, torch.Generator().manual_seed(0), scale=2.0)
    student, method = Classifier(conv_net(), head).eval(), make(LUCIR, fabric, **settings)
    return LUCIRObjective(student, Teacher(conv_net()), method.classification, method, old, new)


def test_it_keeps_the_contract_of_methods(fabric):
    cps.check_method(lambda backbone: LUCIR(backbone, train=QUICK, memory=MEMORY, fabric=fabric))


def test_the_weight_of_the_feature_term_grows_with_the_root_of_old_over_new_classes(fabric):
    assert objective(fabric, 50, 10).feature_weight == pytest.approx(11.18, abs=0.01)


def test_the_loss_is_the_sum_of_its_three_terms(fabric):
    terms = objective(fabric, 3, 2, feature_weight=4.0, ranking_weight=0.7, margin=0.3)
    pixels, labels = torch.randn(6, 2, 6, 6), torch.tensor([0, 1, 2, 3, 4, 3])
    found = terms(pixels, labels, cps.CrossEntropy())
    features, old = terms.student.backbone(pixels), terms.teacher(pixels)
    cosines = torch.stack([F.cosine_similarity(features, vector[None]) for vector in terms.head.weight], dim=1)
    angles = torch.stack(
        [1 - one @ other / one.norm() / other.norm() for one, other in zip(features, old, strict=True)]
    )
    lacking = [max(0, 0.3 - cosines[i, i].item() + cosines[i, k].item()) for i in range(3) for k in (3, 4)]
    expected = F.cross_entropy(2 * cosines, labels) + 4 * math.sqrt(3 / 2) * angles.mean() + 0.7 * sum(lacking) / 6
    torch.testing.assert_close(found, expected)


def test_without_both_terms_it_is_plain_training_of_a_cosine_head_to_the_bit(fabric):
    tasks = [make_task(10 * index) for index in range(3)]
    plain, without = make(CosineMethod, fabric), make(LUCIR, fabric, feature_weight=0.0, ranking_weight=0.0)
    assert same_trajectory(plain, without, tasks)
    assert not same_trajectory(make(CosineMethod, fabric), make(LUCIR, fabric), tasks)


def test_it_remembers(fabric):
    method = make(LUCIR, fabric, train=LONGER, memory=Memory(60), scale=5.0)
    assert min(right_after_three_tasks(method)) > 9
