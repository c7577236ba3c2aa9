"""Plain training steps."""

import copy

import torch
from torch import nn

import cps
from cps.data.batch_transform import BatchTransform
from cps.data.examples import TensorExamples
from cps.network.classifier import Classifier
from cps.network.freezing import Protected
from cps.training.steps import EpochPlan, PlainSteps
from samples import ACCELERATOR, ListDataset, conv_net, make_task


def test_plain_steps_in_mixed_precision_work_with_any_loss(make_learner):
    fabric, task = cps.make_fabric(accelerator=ACCELERATOR, precision="bf16-mixed"), make_task(0)
    training = cps.Training(1, cps.Adam(1e-2), batch_size=16, loss=cps.Contrastive())
    learner = make_learner(train=training, retrain=training, fabric=fabric)
    learner.learn(cps.Task(task.classes, ListDataset(*task.train)))
    assert learner.predict(task.test[0]).classes


def test_plain_steps_follow_the_plan():
    """The learning rate of each step, the shares of a process, and the guard are those of a loop written by hand."""
    torch.manual_seed(0)
    fabric = cps.make_fabric(accelerator="cpu", precision="32-true")
    images, labels = torch.randn(8, 3, 6, 6), torch.arange(8) % 2
    model = Classifier(conv_net(3), nn.Linear(12, 2))
    other = copy.deepcopy(model)
    weight = model.backbone[0].weight.detach().clone()
    taken = torch.rand(8, 3, 1, 1) < 0.5
    guard = {"0.weight": Protected(taken, weight, torch.zeros_like(taken))}
    training = cps.Training(1, cps.SGD(0.1), batch_size=4)
    order, factors, shares = torch.randperm(8).split(4), [1.0, 0.5], [1.0, 0.25]
    steps = PlainSteps(model, training, fabric, BatchTransform())
    steps.begin(model.train(), guard, None)
    total = float(steps.run(TensorExamples(images, labels), EpochPlan(order, torch.zeros(8, 0), factors, shares)))
    steps.write_back()
    steps.release()
    optimizer, expected = cps.SGD(0.1)(other.train().parameters()), 0.0
    for batch, factor, share in zip(order, factors, shares, strict=True):
        optimizer.param_groups[0]["lr"] = 0.1 * factor
        loss = nn.functional.cross_entropy(other(images[batch]), labels[batch]) * share
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            other.backbone[0].weight.copy_(torch.where(taken, weight, other.backbone[0].weight))
        expected += float(loss.detach())
    torch.testing.assert_close(dict(model.state_dict()), dict(other.state_dict()))
    torch.testing.assert_close(total, expected)
    assert torch.equal(model.backbone[0].weight[taken.expand_as(weight)], weight[taken.expand_as(weight)])
    assert not torch.equal(model.backbone[0].weight, weight)
    torch.testing.assert_close(steps.optimizer_state()["state"], optimizer.state_dict()["state"])
