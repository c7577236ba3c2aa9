"""iTAML: its step, its loss, its adapted copies and its selector."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from method_samples import MEMORY, QUICK

import cps
from cps.methods.blocks.memory import Memory
from cps.methods.finetuning import Finetuning
from cps.methods.replay import itaml
from cps.methods.replay.itaml import ITAML, BaseOutput, OwnTaskSigmoids
from cps.network.classifier import Classifier
from samples import conv_net, make_task

ADAPT = cps.Training(1, cps.Adam(1e-2, weight_decay=0.0), batch_size=8)


def make(fabric, kind=ITAML, **settings):
    torch.manual_seed(0)
    quick = {"train": QUICK, "memory": MEMORY, "adapt": ADAPT} if kind is ITAML else {"train": QUICK}
    return kind(conv_net(), fabric=fabric, **{**quick, **settings})


def tasks(number=3, images=24):
    return [make_task(10 * index, images=images) for index in range(number)]


@pytest.mark.parametrize(
    "settings",
    [{}, pytest.param({"as_released": True, "inner_steps": 2}, marks=pytest.mark.slow)],
    ids=["paper", "released"],
)
def test_it_keeps_the_contract_of_methods(fabric, settings):
    options = {"train": QUICK, "memory": MEMORY, "adapt": ADAPT, "fabric": fabric, **settings}
    cps.check_method(lambda backbone: ITAML(backbone, **options))


def test_its_selector_keeps_the_contract_of_selectors():
    cps.check_selector(BaseOutput())


def test_the_rate_falls_with_every_task(fabric, monkeypatch):
    rates = []

    class Steps(itaml.PerTaskSteps):
        def __init__(self, fit, fabric, tasks, rate, **settings):
            rates.append(rate)
            super().__init__(fit, fabric, tasks, rate, **settings)

    monkeypatch.setattr(itaml, "PerTaskSteps", Steps)
    method = make(fabric, train=cps.Training(1, batch_size=32))
    for task in tasks(4):
        method.learn(task)
    assert rates == pytest.approx([1, 0.905, 0.819, 0.741], abs=1e-3)


def test_the_loss_is_that_of_the_classes_of_an_images_own_task():
    torch.manual_seed(0)
    model, labels = Classifier(conv_net(), torch.nn.Linear(12, 5)).eval(), torch.tensor([1, 4, 0, 2])
    pixels, of_class = torch.randn(4, 2, 6, 6), torch.tensor([0, 0, 1, 1, 1])
    loss = OwnTaskSigmoids(model, of_class)(pixels, labels, cps.CrossEntropy())
    probabilities, sums = model(pixels).sigmoid(), []
    for row, label in zip(probabilities, labels.tolist(), strict=True):
        own = (0, 1) if label < 2 else (2, 3, 4)
        sums += [-(row[c].log() if c == label else (1 - row[c]).log()) for c in own]
    torch.testing.assert_close(loss, torch.stack(sums).mean())


def test_the_first_task_is_plain_training_to_the_bit(fabric):
    class Plain(Finetuning):
        def objective(self, task):
            return OwnTaskSigmoids(self.model, torch.zeros(self.num_classes).long())

    method, plain = make(fabric), make(fabric, Plain)
    for each in (method, plain):
        each.learn(make_task(0))
    torch.testing.assert_close(method.model.state_dict(), plain.model.state_dict(), rtol=0, atol=0)


def test_without_memory_and_damping_it_is_finetuning_with_the_loss_of_each_task_to_the_bit(fabric):
    class Plain(Finetuning):
        def objective(self, task):
            classes = [number for number, names in enumerate(self.classes) for _ in names]
            return OwnTaskSigmoids(self.model, torch.tensor(classes))

    method, plain = make(fabric, memory=Memory(0), beta=0.0), make(fabric, Plain)
    for task in tasks():
        for each in (method, plain):
            each.learn(task)
        torch.testing.assert_close(method.model.state_dict(), plain.model.state_dict(), rtol=0, atol=0)
    images = make_task(0).test[0]
    assert all(torch.equal(each.features, each.logits) for each in method.evidence(images))  # nothing to adapt to
    assert "adapted copies" not in method.kept()


def test_a_copy_is_adapted_to_every_task_and_the_base_network_stays(fabric):
    method = make(fabric)
    for number, task in enumerate(tasks(2), start=1):
        method.learn(task)
        assert method.kept()["adapted copies"] == number * method.kept()["weights"]
    images = make_task(0).test[0]
    base = method.model.eval()(images).detach()
    for own, outputs in zip(base.split(2, dim=1), method.evidence(images), strict=True):
        torch.testing.assert_close(outputs.features, own)
        assert not torch.allclose(outputs.logits, own)


def test_adaptation_is_training_on_the_images_of_the_task_in_memory(fabric):
    """One batch of all ten, in training mode, so that the running statistics follow the task."""
    method = make(fabric, adapt=cps.Training(1, cps.SGD(0.1, 0.0, 0.0), batch_size=64))
    for task in tasks(2):
        method.learn(task)
    adapted = copy.deepcopy(method.model).train()
    images, targets = method.exemplars.examples().images[:10], torch.arange(2).repeat_interleave(5)
    F.binary_cross_entropy_with_logits(adapted(images)[:, :2], F.one_hot(targets).float()).backward()
    torch.optim.SGD(adapted.parameters(), 0.1).step()
    pixels = make_task(0).test[0]
    expected = adapted.eval()(pixels)[:, :2].detach()
    torch.testing.assert_close(method.evidence(pixels)[0].logits, expected, rtol=1e-4, atol=1e-5)


def test_the_base_network_finds_the_task_and_the_adapted_copy_the_class(fabric):
    method = make(fabric)
    for task in tasks(2):
        method.learn(task)
    outputs = method.evidence(make_task(0).test[0])
    found = method.predict(make_task(0).test[0], group_size=4)
    largest = torch.stack([each.features.amax(dim=1) for each in outputs], dim=1)  # (images, tasks)
    chosen = largest.reshape(-1, 4, 2).mean(dim=1).argmax(dim=1).repeat_interleave(4)
    assert torch.equal(found.tasks, chosen)
    classes = [outputs[task].logits[image].argmax().item() for image, task in enumerate(chosen.tolist())]
    assert found.classes == [method.classes[task][own] for task, own in zip(chosen.tolist(), classes, strict=True)]


@pytest.mark.parametrize("inner_steps", [1, 3])
def test_a_budget_counts_inner_steps_and_adaptation(fabric, inner_steps):
    method = make(fabric, passes=4.0, inner_steps=inner_steps)
    for task in tasks():
        before = method.image_passes
        method.learn(task)
        assert 4 * 24 <= method.image_passes - before < 4 * 24 + inner_steps * 16 + len(method.classes) * 8


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"tasks": 0}, "tasks of iTAML must be above 0"),
        ({"inner_steps": 0}, "inner_steps of iTAML must be above 0"),
        ({"beta": -1.0}, "beta of iTAML must be 0 or more"),
        ({"beta": math.nan}, "beta of iTAML must be 0 or more"),
        ({"train": cps.Training(1, batch_size=1)}, "batches of 2 images or more"),
    ],
)
def test_wrong_settings_raise(fabric, settings, match):
    with pytest.raises(ValueError, match=match):
        make(fabric, **settings)


def test_it_remembers_every_task(fabric):
    method = make(fabric, train=cps.Training(10, cps.Adam(1e-2), batch_size=16), memory=Memory(60))
    all_tasks = tasks(3, images=48)
    for task in all_tasks:
        method.learn(task)
    for index, task in enumerate(all_tasks):
        images, labels = task.test
        found = method.predict(images, task=index).classes
        assert sum(a == b for a, b in zip(found, labels, strict=True)) > 9
