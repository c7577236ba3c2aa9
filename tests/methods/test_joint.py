"""Joint training learns all tasks at once."""

import pytest
import torch

import cps
from cps.methods.joint import Joint
from samples import conv_net, make_task


def test_joint_training_learns_all_tasks(fabric):
    tasks = [make_task(10 * index, images=48) for index in range(3)]
    torch.manual_seed(0)
    method = Joint(conv_net(), train=cps.Training(20, cps.Adam(1e-2), batch_size=16), fabric=fabric)
    method.learn_all(tasks)
    assert method.classes == [task.classes for task in tasks]
    for task in tasks:
        images, labels = task.test
        assert sum(a == b for a, b in zip(method.predict(images).classes, labels, strict=True)) > 9


def test_joint_training_takes_no_single_task(fabric):
    with pytest.raises(TypeError, match="call learn_all"):
        Joint(conv_net(), fabric=fabric).learn(make_task(0))
