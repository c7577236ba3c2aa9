"""The frame of methods with one head: what every method gets from it."""

import math

import pytest
import torch
from method_samples import MEMORY, QUICK, same_trajectory

import cps
from cps.methods.blocks.memory import Memory
from cps.methods.finetuning import Finetuning
from cps.methods.replay.experience_replay import ExperienceReplay
from cps.methods.replay.icarl import ICaRL
from cps.methods.task_training import phase_shares
from cps.methods.trained_method import HEAD
from cps.network.classifier import make_head
from cps.network.freezing import Protected
from cps.runtime.seeding import generator
from cps.training import checkpoint
from cps.training.objective import Objective
from samples import ListDataset, conv_net, make_task


class PlainLoss(Objective):
    """The loss of the training settings."""

    def forward(self, pixels, labels, loss):
        return self.student(pixels, labels, loss)


def finetuning(fabric, kind=Finetuning, **settings):
    torch.manual_seed(0)
    return kind(conv_net(), fabric=fabric, **{"train": QUICK, **settings})


def tasks(number=3, images=24):
    return [make_task(10 * index, images=images) for index in range(number)]


def accuracy(method, task):
    images, labels = task.test
    return sum(found == label for found, label in zip(method.predict(images).classes, labels, strict=True)) / len(
        labels
    )


def test_finetuning_keeps_the_contract_of_methods(fabric):
    cps.check_method(lambda backbone: Finetuning(backbone, train=QUICK, fabric=fabric))


def test_finetuning_forgets_earlier_tasks(fabric):
    method = finetuning(fabric, train=cps.Training(20, cps.Adam(1e-2), batch_size=16))
    first, second = tasks(2, images=96)
    method.learn(first)
    assert accuracy(method, first) > 0.9
    method.learn(second)
    assert accuracy(method, second) > 0.9
    assert accuracy(method, first) < 0.5


def test_the_first_task_is_plain_training(fabric):
    """The same classifier, trained with the trainer of the library alone."""
    from cps.data.batch_transform import BatchTransform
    from cps.data.examples import TensorExamples
    from cps.network.classifier import Classifier
    from cps.training.trainer import Trainer

    task = make_task(0)
    method = finetuning(fabric)
    method.learn(task)
    torch.manual_seed(0)
    model = Classifier(conv_net(), make_head(12, 2, generator(0, 0, HEAD))).to(fabric.device)
    examples = TensorExamples(task.train[0], torch.tensor(task.train[1]))
    Trainer(fabric).fit(model, examples, QUICK, seed=(0, 0, 0), transform=BatchTransform())
    torch.testing.assert_close(method.model.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_a_method_can_protect_what_training_must_not_move(fabric):
    class FixedHead(Finetuning):
        """Finetuning of the backbone below a head that stays as it was drawn."""

        def objective(self, task):
            return PlainLoss(self.model)

        def guard(self, task):
            head = self.model.head.weight.detach()
            return {"head.weight": Protected(torch.ones_like(head).bool(), head.clone(), torch.zeros_like(head).bool())}

    method, plain = finetuning(fabric, FixedHead), finetuning(fabric)
    for each in (method, plain):
        each.learn(make_task(0))
    drawn = make_head(12, 2, generator(0, 0, HEAD)).weight.to(fabric.device)
    assert torch.equal(method.model.head.weight, drawn)
    assert not torch.equal(plain.model.head.weight, drawn)
    assert not torch.equal(method.model.backbone[0].weight.cpu(), method.backbone[0].weight)


def test_a_method_with_a_memory_says_that_it_keeps_images(fabric):
    assert [finetuning(fabric, memory=memory).assumes.replay for memory in (None, MEMORY)] == [False, True]


def test_phases_share_image_passes_by_epochs_and_images():
    phases = [(cps.Training(40), 100), (cps.Training(10), 100), (cps.Training(30), 0)]
    assert phase_shares(*phases) == [0.8, 0.2, 0.0]
    assert phase_shares((cps.Training(3), 7)) == [1.0]


def test_a_grown_head_keeps_the_rows_of_old_classes(fabric):
    method = finetuning(fabric)
    method.learn(make_task(0))
    before = method.model.head.weight.detach().clone()
    method._grow((10, 11, 12))
    assert method.model.head.weight.shape == (5, 12)
    assert torch.equal(method.model.head.weight[:2], before)


def test_a_method_continues_from_its_file_as_if_it_had_never_stopped(fabric, tmp_path):
    first, second = tasks(2)
    whole = finetuning(fabric, ExperienceReplay, memory=MEMORY)
    whole.learn(first)
    whole.save(tmp_path / "method")
    other = finetuning(fabric, ExperienceReplay, memory=MEMORY)
    other.load(tmp_path / "method")
    assert other.classes == whole.classes
    assert other.image_passes == whole.image_passes
    assert same_trajectory(whole, other, [second])
    assert other.kept() == whole.kept()


def test_a_file_of_a_method_with_other_settings_is_refused(fabric, tmp_path):
    method = finetuning(fabric)
    method.learn(make_task(0))
    method.save(tmp_path / "method")
    with pytest.raises(ValueError, match="has another method or other settings"):
        finetuning(fabric, ExperienceReplay).load(tmp_path / "method")
    with pytest.raises(ValueError, match="has another method or other settings"):
        finetuning(fabric, train=cps.Training(3)).load(tmp_path / "method")


def test_a_task_that_fails_in_training_changes_nothing(fabric):
    method = finetuning(fabric, ExperienceReplay, memory=MEMORY)
    method.learn(make_task(0))
    before = method.state()

    def fail(at):
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        method.learn(make_task(10), on_epoch=fail)
    after = method.state()
    assert (after.classes, after.input_shape, after.image_passes) == before[:3]
    torch.testing.assert_close(after.tensors, before.tensors, rtol=0, atol=0)


def test_a_checkpoint_of_another_task_or_method_is_refused(fabric, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "MAX_WRITING_SHARE", math.inf)  # epochs this short would be skipped
    finetuning(fabric).learn(make_task(0), checkpoint=tmp_path / "checkpoint")
    with pytest.raises(ValueError, match="differs in: classes"):
        finetuning(fabric).learn(make_task(10), checkpoint=tmp_path / "checkpoint")
    with pytest.raises(ValueError, match="differs in: method"):
        finetuning(fabric, ExperienceReplay).learn(make_task(0), checkpoint=tmp_path / "checkpoint")


def test_negative_control_a_method_that_repeats_what_is_done_between_its_phases_breaks_the_contract(fabric):
    class Repeats(Finetuning):
        def train_task(self, task):
            task.fit(self.model, task.examples, self.train, share=0.5)
            self.buffers["scale"] = 2 * self.buffers.get("scale", torch.ones(1))  # in a resumed task, too
            task.fit(self.model, task.examples, self.train, phase="second", share=0.5)

        def logits(self, features):
            return self.buffers["scale"] * super().logits(features)

    with pytest.raises(AssertionError, match="resumed must end with the same bits"):
        cps.check_method(lambda backbone: Repeats(backbone, train=QUICK, fabric=fabric))


@pytest.mark.parametrize("passes", [0.5, 3.0])
def test_with_a_budget_every_task_sees_the_same_number_of_images(fabric, passes):
    budgets = []
    for kind, memory in ((Finetuning, None), (ExperienceReplay, MEMORY), (ExperienceReplay, Memory(0))):
        method = finetuning(fabric, kind, memory=memory, passes=passes)
        for task in tasks(2):
            before = method.image_passes
            method.learn(task)
            budgets.append(method.image_passes - before)
    assert all(passes * 24 <= budget < passes * 24 + QUICK.batch_size for budget in budgets)


def test_phases_share_a_budget_by_their_image_passes():
    assert phase_shares((cps.Training(10), 90), (cps.Training(20), 5)) == [0.9, 0.1]


def test_with_nearest_means_the_training_is_the_same_and_the_classification_is_that_of_icarl(fabric):
    by_head, by_mean = (
        finetuning(fabric, ExperienceReplay, memory=MEMORY, nearest_mean=nearest) for nearest in (False, True)
    )
    assert same_trajectory(by_head, by_mean, tasks(2))
    images = make_task(0).test[0]
    icarl = finetuning(fabric, ICaRL, memory=MEMORY)
    icarl.restore(by_mean.state())
    for found, expected in zip(by_mean.evidence(images), icarl.evidence(images), strict=True):
        assert torch.equal(found.logits, expected.logits)
    assert not torch.equal(by_mean.evidence(images)[0].logits, by_head.evidence(images)[0].logits)


def test_nearest_means_without_a_memory_raise_before_the_training(fabric):
    method = finetuning(fabric, nearest_mean=True, on_epoch=pytest.fail)
    with pytest.raises(ValueError, match="needs a memory for at least 1 of the images of each class"):
        method.learn(make_task(0))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"backbone": "resnet"}, "must be an nn.Module"),
        ({"passes": 0}, "must be a positive number of passes"),
        ({"workers": -1}, "workers of finetuning must be 0 or more, got -1"),
        ({"on_epoch": 3}, "on_epoch must be a function"),
    ],
)
def test_wrong_settings_raise(fabric, change, match):
    settings = {"backbone": conv_net(), "fabric": fabric, **change}
    with pytest.raises((TypeError, ValueError), match=match):
        Finetuning(**settings)


def test_bad_tasks_raise_and_change_nothing(fabric):
    method = finetuning(fabric)
    with pytest.raises(RuntimeError, match="nothing has been learned yet"):
        method.evidence(torch.zeros(1, 2, 6, 6))
    method.learn(make_task(0))
    images, labels = make_task(10).train
    for task, match in (
        (make_task(0), "already learned, in task 0"),
        (cps.Task([7, 7], train=(images, [7] * 24)), "names a class twice"),
        (cps.Task([10, 12], train=(images, [10] * 24)), "class 12 has no training image"),
        (cps.Task([10, 11], train=(images[:, :, :4], labels)), "images must have shape"),
    ):
        with pytest.raises(ValueError, match=match):
            method.learn(task)
    with pytest.raises(TypeError, match="task must be a cps.Task"):
        method.learn((images, labels))
    assert method.classes == [(0, 1)]


def test_data_sets_and_tensors_give_the_same_method(fabric):
    first, second = tasks(2)
    as_datasets = [cps.Task(task.classes, train=ListDataset(*task.train)) for task in (first, second)]
    methods = [finetuning(fabric, ExperienceReplay, memory=MEMORY) for _ in range(2)]
    for method, sequence in zip(methods, ((first, second), as_datasets), strict=True):
        for task in sequence:
            method.learn(task)
    torch.testing.assert_close(methods[0].state().tensors, methods[1].state().tensors)
