"""The learner: which input `learn` and `predict` accept, and what they leave unchanged."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import cps
from samples import ACCELERATOR, Energy, EveryOther, conv_net, make_task

IMAGES, LABELS = make_task(10).train


def test_repr_and_classes_describe_the_learned_tasks(make_learner):
    learner = make_learner()
    learner.learn(make_task(3))
    assert learner.classes == [(3, 4)]
    assert repr(learner) == "Learner(tasks=1, classes=2)"


def test_a_task_smaller_than_a_batch_is_learned(make_learner):
    learner = make_learner()
    images, labels = make_task(0).train
    learner.learn(cps.Task([0, 1], train=(images[:5], labels[:5])))
    assert len(learner.predict(images).classes) == 24


def test_a_last_batch_of_one_image_is_skipped_since_batch_norm_needs_two(make_learner):
    learner = make_learner(train=cps.Training(1, batch_size=8), retrain=cps.Training(1, batch_size=8))
    learner.learn(make_task(0, images=25))
    private = learner.network.subnetworks[0].private
    assert int(private["1.num_batches_tracked"]) == 2 * 3  # three batches of eight in each of the two epochs
    assert all(value.isfinite().all() for value in private.values())


def test_batches_of_one_image_are_learned(make_learner):
    task = make_task(0, images=4)
    learner = make_learner(train=cps.Training(1, batch_size=1), rounds=0)
    learner.learn(task)
    assert int(learner.network.subnetworks[0].private["1.num_batches_tracked"]) == 4
    assert set(learner.predict(task.test[0]).classes) <= {0, 1}


@pytest.mark.parametrize("task", [1, 7, -1])
def test_an_unknown_task_index_raises(learned, task):
    with pytest.raises(ValueError, match="below 1, the number of learned tasks"):
        learned.predict(IMAGES, task=task)
    with pytest.raises(ValueError, match="below 1, the number of learned tasks"):
        learned.fingerprint(task)


def test_a_task_index_must_be_an_integer(make_learner):
    learner = make_learner()
    learner.learn(make_task(0))
    with pytest.raises(TypeError, match="task must be an integer index from 0, got 'cat'"):
        learner.predict(make_task(0).train[0], task="cat")


def test_predict_raises_for_a_wrong_selector_task_or_group_size(learned):
    learner, images = learned, make_task(0).test[0]
    with pytest.raises(TypeError, match="a selector must be an object"):
        learner.predict(images, selector="MaxOutput")
    with pytest.raises(ValueError, match="pass either task or selector, not both"):
        learner.predict(images, selector=cps.MaxOutput(), task=0)
    with pytest.raises(ValueError, match=r"task must be in \[0, 1\), got 99"):
        learner.predict(images, selector=cps.Oracle(99))
    with pytest.raises(ValueError, match="group_size must be an integer, 1 or more, got 2.5"):
        learner.predict(images, group_size=2.5)


def test_predict_raises_for_a_single_image_and_for_arguments_of_the_wrong_type(learned):
    with pytest.raises(ValueError, match=r"pass a single image as image\[None\]"):
        learned.predict(IMAGES[0])
    with pytest.raises(TypeError, match="task must be an integer index"):
        learned.predict(IMAGES, task=True)
    with pytest.raises(ValueError, match="group_size must be an integer, 1 or more, got '2'"):
        learned.predict(IMAGES, group_size="2")
    for size in (np.int64(2), torch.tensor(2), 2.0):
        assert len(learned.predict(IMAGES, group_size=size).classes) == len(IMAGES)


def test_a_diverging_loss_raises_and_changes_nothing(make_learner):
    learner = make_learner(train=cps.Training(4, cps.SGD(1e30), batch_size=16))
    with pytest.raises(FloatingPointError, match="learning rate"):
        learner.learn(make_task(0))
    assert learner.network.subnetworks == []


def test_every_form_of_data_gives_the_same_bits(make_learner):
    """Tensors, arrays, a TensorDataset, a Dataset of arrays; labels as integers, names or indices."""
    images, labels = make_task(0).train
    local = torch.tensor(labels)

    class Pairs(Dataset):
        targets = labels

        def __len__(self):
            return len(images)

        def __getitem__(self, index):
            return images[index].numpy(), np.int64(labels[index])

    names = ["cat", "dog"]
    forms = [
        cps.Task([0, 1], train=(images, labels)),
        cps.Task([0, 1], train=(images.numpy(), np.array(labels))),
        cps.Task([0, 1], train=(images.double().numpy(), local)),
        cps.Task([0, 1], train=TensorDataset(images, local)),
        cps.Task([0, 1], train=Pairs()),
        cps.Task(names, train=(images, [names[label] for label in labels])),
        cps.Task(names, train=(images, labels)),
        cps.Task(np.array([0, 1]), train=(images, np.array(labels))),
    ]
    if ACCELERATOR != "cpu":  # on a GPU, images that are read from a dataset are trained by another step
        forms = [task for task in forms if not isinstance(task.train, Pairs)]
    logits = []
    for task in forms:
        learner = make_learner()
        learner.learn(task)
        logits.append(learner.evidence(images)[0].logits)
        if task.classes == tuple(names):
            assert set(learner.predict(images).classes) <= set(names)
    assert all(torch.equal(logits[0], other) for other in logits[1:])


def test_uint8_images_are_scaled_to_the_unit_interval(make_learner):
    learner = make_learner()
    images = torch.randint(0, 256, (24, 2, 6, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    learner.learn(cps.Task([0, 1], train=(images, [0, 1] * 12)))
    scaled = learner.evidence(images.to(learner.network.device).float() / 255)[0].logits  # devices divide differently
    torch.testing.assert_close(learner.evidence(images)[0].logits, scaled)


def test_learning_computes_no_gradients_of_the_images(make_learner):
    images = IMAGES.clone().requires_grad_()
    make_learner().learn(cps.Task([10, 11], train=(images, LABELS)))
    assert images.grad is None


def test_learning_works_inside_no_grad(make_learner):
    images = make_task(0).test[0]
    outside, inside = make_learner(), make_learner()
    outside.learn(make_task(0))
    with torch.no_grad():
        inside.learn(make_task(0))
    assert inside.predict(images).classes == outside.predict(images).classes
    assert inside.fingerprint(0) == outside.fingerprint(0)


def test_a_backbone_that_works_in_place_does_not_change_the_callers_images(make_learner):
    backbone = nn.Sequential(nn.ReLU(inplace=True), *conv_net())
    learner = make_learner(backbone)
    task = make_task(0)
    before = task.train[0].clone()
    learner.learn(task)
    learner.learn(make_task(10))
    learner.predict(task.train[0])
    assert torch.equal(task.train[0], before)


def test_zero_rounds_is_cps_frozen(make_learner):
    """The first task learns all convolutions, and later tasks use all of them and learn only norms and head."""
    learner = make_learner(rounds=0)
    learner.learn(make_task(0))
    shared = {name: value.clone() for name, value in learner.network.weights.items()}
    second = learner.learn(make_task(10))
    assert all(torch.equal(value, shared[name]) for name, value in learner.network.weights.items())
    assert all(mask.all() for mask in second.masks.values())
    first = learner.network.subnetworks[0]
    assert not torch.equal(first.private["1.weight"], second.private["1.weight"])


def test_a_custom_pruner_and_selector_work_and_must_be_given_to_load(make_learner, tmp_path):
    learner = make_learner(pruner=EveryOther(1), selectors=(Energy(), cps.MaxOutput()))
    learner.learn(make_task(0))
    learner.learn(make_task(10))
    images = make_task(10).test[0]
    learner.save(tmp_path / "model.cps")
    with pytest.raises(ValueError, match="selectors="):
        cps.load(tmp_path / "model.cps", learner.network.backbone)
    loaded = cps.load(
        tmp_path / "model.cps", learner.network.backbone, selectors=learner.config.selectors, fabric=learner.fabric
    )
    assert loaded.config.pruner == EveryOther(1)
    assert loaded.predict(images).classes == learner.predict(images).classes


def test_on_epoch_is_called_after_every_epoch_with_the_progress(make_learner):
    calls = []
    learner = make_learner(on_epoch=calls.append, train=cps.Training(3), rounds=2)
    learner.learn(make_task())
    assert [(progress.task, progress.done, progress.total) for progress in calls] == [
        (0, done, 7) for done in range(1, 8)
    ]
    assert [(progress.epoch, progress.epochs) for progress in calls] == [
        (1, 3),
        (2, 3),
        (3, 3),
        (1, 2),
        (2, 2),
        (1, 2),
        (2, 2),
    ]
    assert list(dict.fromkeys(progress.phase_name for progress in calls)) == [
        "training", "retraining, round 1 of 2", "retraining, round 2 of 2",
    ]  # fmt: skip


def test_a_scenario_is_no_task(make_learner):
    with pytest.raises(TypeError, match="learn its tasks one by one"):
        make_learner().learn(cps.Scenario((), "given"))
