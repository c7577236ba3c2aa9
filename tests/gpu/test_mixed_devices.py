"""Images, pruners and selectors may be on another device than the learner; ask more with CPS_TEST_ACCELERATOR=cuda."""

import torch

import cps
from samples import conv_net, make_task


def test_images_on_the_learners_device_are_learned_and_evaluated(make_learner):
    learner, task = make_learner(), make_task(0)
    device = learner.network.device
    train, test = (task.train[0].to(device), task.train[1]), (task.test[0].to(device), task.test[1])
    on_device = cps.Task(task.classes, train, test=test, val=test)
    learner.learn(on_device)
    assert cps.evaluate(learner, [on_device], group_sizes=[1]).task_il.ACC > 0


class OnCPU(cps.MaxOutput):
    """A selector that keeps and returns everything on the CPU."""

    name = "OnCPU"

    def observe(self, subnetwork, evidence, labels, earlier):
        return {"mean": evidence[-1].features.cpu().mean(dim=0)}

    def __call__(self, evidence, statistics, groups):
        assert {kept["mean"].device for kept in statistics} == {groups.device}
        return super().__call__(evidence, statistics, groups).cpu()


class HalfOnCPU:
    """A pruner that switches off every second input, with masks on the CPU."""

    def __call__(self, backbone, masks, batches):
        return {name: mask.cpu() & (torch.arange(mask.shape[1]) % 2 == 0).view(1, -1, *[1] * (mask.ndim - 2))
                for name, mask in masks.items()}  # fmt: skip


def test_pruners_and_selectors_that_compute_on_the_cpu_work_with_any_learner(make_learner, tmp_path):
    learner = make_learner(pruner=HalfOnCPU(), selectors=[OnCPU()])
    for first in (0, 10):
        learner.learn(make_task(first))
    images = make_task(0).test[0]
    learner.save(tmp_path / "model.cps")
    settings = {"pruner": HalfOnCPU(), "selectors": [OnCPU()], "fabric": learner.fabric}
    loaded = cps.load(tmp_path / "model.cps", conv_net(), **settings)
    assert loaded.predict(images).classes == learner.predict(images).classes
