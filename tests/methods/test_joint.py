"""Joint training learns all tasks at once, from any kind of data."""

import math

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

import cps
from cps.methods.finetuning import Finetuning
from cps.methods.joint import Joint
from cps.methods.single_head import SingleHeadTrainer
from cps.training import checkpoint
from samples import ListDataset, conv_net, make_task


def make_trainer(fabric, tasks, epochs=20):
    torch.manual_seed(0)
    return SingleHeadTrainer(conv_net(), tasks, cps.Training(epochs, cps.Adam(1e-2), batch_size=16), fabric=fabric)


@pytest.fixture(scope="module")
def tasks():
    return [make_task(10 * index, images=48) for index in range(3)]


def test_joint_training_learns_all_tasks(fabric, tasks):
    metrics = Joint(make_trainer(fabric, tasks)).run()
    assert metrics.accuracy.shape == (1, 3)
    assert metrics.ACC == pytest.approx(metrics.accuracy.mean())
    assert metrics.accuracy.min() > 80


def test_tensors_data_sets_and_subsets_give_the_same_result(fabric, tasks):
    images = torch.cat([task.train[0] for task in tasks])
    labels = [label for task in tasks for label in task.train[1]]
    whole = ListDataset(images, labels)
    parts = [Subset(whole, range(48 * index, 48 * index + 48)) for index in range(3)]
    as_subsets = [cps.Task(task.classes, part, test=task.test) for task, part in zip(tasks, parts, strict=True)]
    as_datasets = [cps.Task(task.classes, ListDataset(*task.train), test=task.test) for task in tasks]
    results = [Joint(make_trainer(fabric, each, epochs=2)).run() for each in (tasks, as_subsets, as_datasets)]
    for other in results[1:]:
        np.testing.assert_array_equal(other.accuracy, results[0].accuracy)


def test_a_checkpoint_of_another_method_is_rejected(fabric, tasks, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "MAX_WRITING_SHARE", math.inf)
    Joint(make_trainer(fabric, tasks, epochs=1)).run(tmp_path / "c")
    with pytest.raises(ValueError, match="differs in: baseline"):
        Finetuning(make_trainer(fabric, tasks, epochs=1)).run(tmp_path / "c")
