"""FOSTER: boosting by a second extractor, and compression into one."""

import pytest
import torch
import torch.nn.functional as F
from method_samples import MEMORY, ONE_EPOCH, QUICK, make, same_trajectory

import cps
from cps.methods.blocks.distillation import distillation_loss
from cps.methods.blocks.memory import Memory
from cps.methods.blocks.teacher import Frozen, Teacher
from cps.methods.expansion.columns import Columns
from cps.methods.expansion.foster import FOSTER, BoostingLoss, CompressionLoss
from cps.methods.finetuning import Finetuning
from cps.network.classifier import Classifier
from samples import conv_net, make_task


def foster(fabric, **settings):
    return make(FOSTER, fabric, **{"memory": MEMORY, "first": QUICK, "compress": QUICK, **settings})


def test_it_keeps_the_contract_of_methods(fabric):
    settings = {"train": QUICK, "first": ONE_EPOCH, "compress": ONE_EPOCH, "memory": MEMORY, "fabric": fabric}
    cps.check_method(lambda backbone: FOSTER(backbone, **settings))


def two_extractors():
    torch.manual_seed(0)
    columns = Columns(conv_net())
    columns.add()
    return Classifier(columns, torch.nn.Linear(24, 5)).eval()


def test_the_boosting_loss_has_balanced_logits_the_new_features_and_the_old_head():
    model, enhancement, old_head = two_extractors(), torch.nn.Linear(12, 5), torch.nn.Linear(12, 5)
    torch.nn.init.normal_(model.backbone.last[3].weight)  # the columns differ
    pixels, labels, weights = torch.randn(6, 2, 6, 6), torch.arange(6) % 5, torch.rand(5) + 0.5
    objective = BoostingLoss(model, enhancement, Teacher(old_head), 3, weights, 2.0, 0.7)
    features = model.backbone(pixels)
    logits, new = model.head(features), features[:, 12:]
    expected = F.cross_entropy(logits / weights, labels) + F.cross_entropy(enhancement(new), labels)
    expected = expected + 0.7 * distillation_loss(logits[:, :3], old_head(features[:, :12])[:, :3])
    torch.testing.assert_close(objective(pixels, labels, cps.CrossEntropy()), expected)


def test_the_compression_loss_is_the_distillation_of_reweighted_probabilities():
    torch.manual_seed(0)
    student, teacher = Classifier(conv_net(), torch.nn.Linear(12, 5)).eval(), two_extractors()
    pixels, labels, weights = torch.randn(6, 2, 6, 6), torch.zeros(6).long(), torch.rand(5) + 0.5
    loss = CompressionLoss(student, Frozen(teacher), weights, 2.0)(pixels, labels, cps.CrossEntropy())
    targets = (teacher(pixels) / 2).softmax(dim=1) * weights
    targets = targets / targets.sum(dim=1, keepdim=True)
    torch.testing.assert_close(loss, -(targets * (student(pixels) / 2).log_softmax(dim=1)).sum(dim=1).mean())
    plain = CompressionLoss(student, Frozen(teacher), torch.ones(5), 2.0)(pixels, labels, cps.CrossEntropy())
    torch.testing.assert_close(plain, distillation_loss(student(pixels), teacher(pixels), 2.0))


class Watched(FOSTER):
    """FOSTER that keeps what it trains in each phase."""

    def train_task(self, task):
        self.objectives, fit = [], task.fit
        task.fit = lambda objective, *args, **options: (
            self.objectives.append(objective) or fit(objective, *args, **options)
        )
        self.old = {name: value.clone() for name, value in self.model.backbone.state_dict().items()}
        super().train_task(task)


def test_the_old_extractor_is_frozen_while_boosting_and_the_compressed_one_replaces_it(fabric):
    train = cps.Training(2, cps.SGD(0.1, weight_decay=0.1), batch_size=16)
    method = make(Watched, fabric, memory=MEMORY, train=train, first=train, compress=train)
    for index in range(2):
        method.learn(make_task(10 * index))
    boosting, compression = method.objectives
    first, second = boosting.student.backbone.columns
    torch.testing.assert_close(dict(first.state_dict()), method.old, rtol=0, atol=0)
    assert not torch.equal(second[0].weight, first[0].weight)
    assert compression.student is method.model
    assert not torch.equal(method.model.backbone[0].weight, first[0].weight)


def test_between_tasks_it_keeps_one_backbone_and_one_head(fabric):
    method = foster(fabric)
    backbone = sum(value.nbytes for value in conv_net().state_dict().values())
    for index in range(2):
        method.learn(make_task(10 * index))
        assert method.kept()["weights"] == backbone + 4 * 2 * (index + 1) * 13
    assert method.kept(learning=True)["two extractors"] == 2 * method.kept()["weights"]
    assert not method.assumes.grows


def test_the_first_task_is_finetuning_with_its_own_training(fabric):
    first = cps.Training(3, cps.Adam(1e-2), batch_size=16)
    methods = [foster(fabric, first=first), make(Finetuning, fabric, train=first)]
    assert same_trajectory(*methods, [make_task(0)])


@pytest.mark.parametrize("memory", [None, Memory(0)])
def test_without_a_memory_it_says_what_it_needs(fabric, memory):
    method = foster(fabric, memory=memory)
    with pytest.raises(ValueError, match="needs a memory for at least 1"):
        method.learn(make_task(0))
    assert method.image_passes == 0


def test_with_a_budget_both_phases_together_see_its_images(fabric):
    method = foster(fabric, passes=4)
    for index in range(2):
        before = method.image_passes
        method.learn(make_task(10 * index))
        assert 4 * 24 <= method.image_passes - before < 4 * 24 + 2 * QUICK.batch_size


def test_it_remembers_what_finetuning_forgets(fabric):
    train = cps.Training(10, cps.Adam(1e-2), batch_size=16)
    tasks = [make_task(10 * index, images=48) for index in range(3)]
    method = foster(fabric, train=train, first=train, compress=train, memory=Memory(30))
    for task in tasks:
        method.learn(task)
    images, labels = tasks[0].test
    assert sum(a == b for a, b in zip(method.predict(images).classes, labels, strict=True)) > 9
