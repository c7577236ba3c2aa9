"""PODNet: its loss as in the paper and as released, and its two ways to classify."""

import math

import pytest
import torch
import torch.nn.functional as F
from method_samples import LONGER, MEMORY, QUICK, right_after_three_tasks, same_trajectory

import cps
from cps.methods.blocks.memory import Memory
from cps.methods.cosine.cosine_method import CosineMethod
from cps.methods.cosine.feature_distillation import angular_distance, pooled_distance
from cps.methods.cosine.similarity_losses import nca_loss, released_nca_loss
from cps.methods.cosine.stage_maps import features_and_maps
from cps.methods.replay.podnet import PODNet, PODNetNME
from samples import conv_net, make_task

BALANCED = cps.Training(1, cps.SGD(0.05), batch_size=8)


class Task:
    """The numbers of classes of a task."""

    def __init__(self, old, new):
        self.old, self.new = old, new


def make(kind, fabric, **settings):
    torch.manual_seed(0)
    quick = {"train": QUICK, "memory": MEMORY, "balanced": BALANCED}
    return kind(cps.SmallConvNet(2, widths=(4, 6)), fabric=fabric, **{**quick, **settings})


def learned(kind, fabric, **settings):
    method = make(kind, fabric, **settings)
    method.learn(make_task(0))
    method._grow((10, 11))
    method.model.eval()
    return method


@pytest.mark.parametrize("kind", [PODNet, pytest.param(PODNetNME, marks=pytest.mark.slow)])
def test_it_keeps_the_contract_of_methods(fabric, kind):
    settings = {"train": QUICK, "memory": MEMORY, "balanced": BALANCED, "proxies": 3, "fabric": fabric}
    cps.check_method(lambda backbone: kind(backbone, **settings))


@pytest.mark.parametrize("kind", [PODNet, PODNetNME])
def test_the_loss_is_the_sum_of_its_three_terms(fabric, kind):
    method = learned(kind, fabric, proxies=2)
    student, pixels, labels = method.model, torch.randn(5, 2, 6, 6), torch.tensor([0, 3, 2, 1, 1])
    objective = method.objective(Task(2, 2))
    with torch.no_grad():  # the student moves away from its teacher
        student.backbone.layers[3].weight += 0.3
    features, maps = features_and_maps(student.backbone, pixels)
    teacher = objective.distillation.teacher.model
    old_features, old_maps = features_and_maps(teacher, pixels)
    weights = {PODNet: (3, 1), PODNetNME: (5, 1)}[kind]
    classified = nca_loss(student.head.similarities(features), labels, student.head.scale, 0.6)
    distances = weights[0] * pooled_distance(maps, old_maps) + weights[1] * angular_distance(features, old_features)
    assert distances > 0.01
    torch.testing.assert_close(objective(pixels, labels, None), classified + math.sqrt(2) * distances)


def test_the_weights_of_the_distances_grow_with_the_root_of_all_over_new_classes(fabric):
    distillation = learned(PODNet, fabric).objective(Task(50, 10)).distillation
    assert distillation.feature_weight == pytest.approx(2.449, abs=1e-3)
    assert distillation.map_weight == pytest.approx(3 * 2.449, abs=3e-3)


def test_a_model_like_its_teacher_has_no_distance(fabric):
    method = learned(PODNet, fabric)
    method.margin = -9.0  # no classification loss
    assert method.objective(Task(2, 2))(torch.randn(5, 2, 6, 6), torch.arange(5) % 4, None).item() < 1e-5


@pytest.mark.parametrize(("kind", "scale"), [(PODNet, 1.0), (PODNetNME, 3.0)])
def test_as_released_similarities_are_minus_squared_distances_of_scaled_unit_vectors(fabric, kind, scale):
    """The published code for 10 vectors of each class, written down again."""
    method = learned(kind, fabric, as_released=True)
    features, labels = torch.randn(6, 6), torch.arange(6) % 4
    points, vectors = scale * F.normalize(features, dim=1), scale * F.normalize(method.head.weight, dim=1)
    distances = -(points[:, None] - vectors[None]).square().sum(dim=2).reshape(6, 4, 10)
    similarities = (distances * distances.softmax(dim=2)).sum(dim=2)
    expected = released_nca_loss(similarities, labels, method.head.scale)
    found = method.classification(method.head, features, labels, cps.CrossEntropy())
    torch.testing.assert_close(found, expected)
    assert (method.head.scale.item() == 1) == (kind is PODNetNME)  # learned, or fixed


def test_gradients_are_clipped(fabric):
    method = learned(PODNet, fabric, max_gradient=0.01)
    objective = method.objective(Task(2, 2))
    (1000 * objective(torch.randn(5, 2, 6, 6), torch.tensor([2, 3, 2, 3, 0]), None)).backward()
    objective.before_step()
    gradients = [value.grad.abs().max().item() for value in method.model.parameters()]
    assert max(gradients) == pytest.approx(0.01)


def test_without_distances_and_with_one_vector_it_is_a_cosine_head_with_the_nca_loss(fabric):
    class NCAMethod(CosineMethod):
        def classification(self, head, features, labels, loss):
            return nca_loss(head.similarities(features), labels, head.scale, 0.6)

    tasks = [make_task(10 * index) for index in range(3)]
    settings = {"map_weight": 0.0, "feature_weight": 0.0, "proxies": 1, "max_gradient": 1e9}
    assert same_trajectory(make(PODNet, fabric, **settings), make(NCAMethod, fabric), tasks)


def test_it_classifies_by_its_head_or_by_nearest_means(fabric):
    by_head, by_mean = make(PODNet, fabric), make(PODNetNME, fabric)
    for method in (by_head, by_mean):
        method.learn(make_task(0))
    assert "means" in by_mean.buffers
    assert "means" not in by_head.buffers
    assert by_mean.group_selector == cps.MaxOutput() != by_head.group_selector


def test_unknown_stages_raise_before_anything_is_learned(fabric):
    with pytest.raises(ValueError, match="stages of a backbone of type Sequential are not known"):
        PODNet(conv_net(), fabric=fabric)
    method = PODNet(conv_net(), stages=("1", "4"), train=QUICK, balanced=BALANCED, memory=MEMORY, fabric=fabric)
    for index in range(2):
        method.learn(make_task(10 * index))
    assert len(method.classes) == 2


def test_it_remembers(fabric):
    method = make(PODNet, fabric, train=LONGER, memory=Memory(60), scale=5.0, proxies=2)
    assert min(right_after_three_tasks(method)) > 9
