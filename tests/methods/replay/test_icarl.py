"""iCaRL: its loss, its memory and its nearest means."""

import pytest
import torch
import torch.nn.functional as F
from method_samples import MEMORY, QUICK

import cps
from cps.methods.blocks.memory import Memory
from cps.methods.blocks.teacher import Teacher
from cps.methods.replay.icarl import DistilledSigmoids, ICaRL
from cps.network.classifier import Classifier
from samples import conv_net, make_task


def classifier(outputs=4):
    torch.manual_seed(0)
    return Classifier(conv_net(), torch.nn.Linear(12, outputs)).eval()


def test_it_keeps_the_contract_of_methods(fabric):
    cps.check_method(lambda backbone: ICaRL(backbone, train=QUICK, memory=MEMORY, fabric=fabric))


def test_the_loss_is_the_mean_binary_cross_entropy_with_the_teachers_sigmoids():
    student, pixels, labels = classifier(), torch.randn(5, 2, 6, 6), torch.tensor([3, 0, 2, 2, 1])
    teacher = Teacher(classifier())
    with torch.no_grad():
        teacher.model.head.bias += 1
    loss = DistilledSigmoids(student, teacher, 2)(pixels, labels, cps.CrossEntropy())
    targets = torch.zeros(5, 4)
    targets[:, :2] = teacher(pixels)[:, :2].sigmoid()  # the label of an exemplar does not count among old classes
    targets[[0, 2, 3], [3, 2, 2]] = 1
    probabilities = student(pixels).sigmoid()
    expected = -(targets * probabilities.log() + (1 - targets) * (1 - probabilities).log()).mean()
    torch.testing.assert_close(loss, expected)


def test_a_student_like_its_teacher_has_no_gradient_for_old_classes():
    student = classifier()
    objective = DistilledSigmoids(student, Teacher(student), 2)
    objective(torch.randn(5, 2, 6, 6), torch.tensor([2, 3, 2, 3, 2]), cps.CrossEntropy()).backward()
    gradient = student.head.weight.grad
    assert gradient[:2].abs().max() < 1e-7 < gradient[2:].abs().max()


def test_with_one_exemplar_of_each_class_an_image_gets_the_class_of_the_nearest(fabric):
    method = ICaRL(conv_net(), train=QUICK, memory=Memory(4), fabric=fabric)
    tasks = [make_task(0), make_task(10)]
    for task in tasks:
        method.learn(task)
    exemplars, images = method.exemplars.examples(), tasks[0].test[0]
    points, centres = (F.normalize(method.features([each]), dim=1) for each in (images, exemplars.images))
    nearest = exemplars.targets[torch.cdist(points, centres).argmin(dim=1).cpu()]
    names = [name for classes in method.classes for name in classes]
    assert method.predict(images).classes == [names[label] for label in nearest.tolist()]


def test_means_follow_the_features_of_every_task_and_include_mirror_images(fabric):
    method = ICaRL(conv_net(), train=QUICK, memory=Memory(8), augment=cps.Flip(), fabric=fabric)
    for index in range(2):
        method.learn(make_task(10 * index))
        images = method.exemplars.images[0]
        views = method.features([images, images.flip(-1)])
        expected = F.normalize(F.normalize(views, dim=1).mean(dim=0), dim=0)
        torch.testing.assert_close(method.buffers["means"][0], expected)


def test_without_a_memory_it_says_what_it_needs(fabric):
    method = ICaRL(conv_net(), train=QUICK, memory=Memory(0), fabric=fabric)
    with pytest.raises(ValueError, match="needs a memory for at least 1 of the images of each class"):
        method.learn(make_task(0))
    assert method.classes == []
