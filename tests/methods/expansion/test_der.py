"""DER: frozen extractors, an auxiliary head and a balanced head."""

import pytest
import torch
import torch.nn.functional as F
from method_samples import MEMORY, ONE_EPOCH, QUICK, make, same_trajectory

import cps
from cps.methods.blocks.memory import Memory
from cps.methods.expansion.der import BALANCED_HEAD, DER, ExpandedLoss, auxiliary_labels
from cps.methods.finetuning import Finetuning
from cps.network.classifier import Classifier, make_head
from cps.runtime.seeding import generator
from samples import conv_net, make_task


def der(fabric, **settings):
    return make(DER, fabric, **{"memory": MEMORY, "balance": QUICK, **settings})


def test_it_keeps_the_contract_of_methods(fabric):
    cps.check_method(lambda backbone: DER(backbone, train=QUICK, balance=ONE_EPOCH, memory=MEMORY, fabric=fabric))


def test_old_classes_are_one_auxiliary_class_and_new_ones_follow():
    assert auxiliary_labels(torch.tensor([3, 0, 4, 5, 6]), 4).tolist() == [0, 0, 1, 2, 3]


def test_the_loss_is_that_of_the_joined_features_plus_that_of_the_new_ones():
    torch.manual_seed(0)
    model, auxiliary = Classifier(conv_net(), torch.nn.Linear(12, 4)).eval(), torch.nn.Linear(5, 3)
    pixels, labels = torch.randn(8, 2, 6, 6), torch.arange(8) % 4
    loss = ExpandedLoss(model, auxiliary, 2)(pixels, labels, cps.CrossEntropy())
    features = model.backbone(pixels)
    expected = F.cross_entropy(model.head(features), labels)
    expected = expected + F.cross_entropy(auxiliary(features[:, 7:]), (labels - 1).clamp(min=0))
    torch.testing.assert_close(loss, expected)


def test_old_extractors_stay_to_the_bit_with_momentum_and_decay(fabric):
    train = cps.Training(2, cps.SGD(0.1, weight_decay=0.1), batch_size=16)
    method, images = der(fabric, train=train, balance=train), make_task(0).test[0]
    earlier = []
    for index in range(3):
        method.learn(make_task(10 * index))
        features = method.features([images])
        assert features.shape == (12, 12 * (index + 1))
        for before in earlier:
            assert torch.equal(features[:, : before.shape[1]], before)
        assert not earlier or not torch.equal(features[:, -12:], features[:, -24:-12])
        earlier.append(features)


def test_it_grows_by_one_backbone_a_task(fabric):
    method = der(fabric)
    backbone = sum(value.nbytes for value in conv_net().state_dict().values())
    for index in range(3):
        method.learn(make_task(10 * index))
        tasks = index + 1
        assert method.kept()["weights"] == tasks * backbone + 4 * 2 * tasks * (12 * tasks + 1)
    assert method.assumes.grows


def test_the_main_phase_keeps_the_weights_of_old_classes_for_old_features(fabric):
    method = der(fabric)
    method.learn(make_task(0))
    before = method.model.head.weight.detach().clone()
    method._grow((10, 11))
    assert torch.equal(method.model.head.weight[:2, :12], before)
    assert method.model.head.weight.shape == (4, 24)


def test_a_balanced_head_is_trained_from_new_weights_and_divided_by_its_temperature(fabric):
    """Without an epoch of it, the head is as it was drawn, divided."""
    none = cps.Training(0, cps.SGD(0.1), batch_size=16)
    method = der(fabric, balance=none)
    for index in range(2):
        method.learn(make_task(10 * index))
    drawn = make_head(24, 4, generator(0, 1, BALANCED_HEAD)).weight.to(fabric.device)
    assert torch.equal(method.model.head.weight, drawn / 5)


def test_the_first_task_is_finetuning_and_without_memory_there_is_no_balanced_head(fabric):
    method, plain, phases = der(fabric, memory=Memory(0)), make(Finetuning, fabric), []
    task = make_task(0)
    method.learn(task)
    plain.learn(task)
    found = {name.replace("columns.0.", ""): value for name, value in method.model.state_dict().items()}
    torch.testing.assert_close(found, dict(plain.model.state_dict()), rtol=0, atol=0)
    method.learn(make_task(10), on_epoch=lambda at: phases.append(at.phase_name))
    assert set(phases) == {"training"}


def test_it_continues_from_its_file_as_if_it_had_never_stopped(fabric, tmp_path):
    method, other = (der(fabric) for _ in range(2))
    for index in range(2):
        method.learn(make_task(10 * index))
    method.save(tmp_path / "method")
    other.load(tmp_path / "method")
    assert torch.equal(method.features([make_task(0).test[0]]), other.features([make_task(0).test[0]]))
    assert [value.requires_grad for value in other.model.parameters()] == [value.requires_grad for value in method.model.parameters()]  # fmt: skip
    assert same_trajectory(method, other, [make_task(20)])


def test_a_task_that_fails_leaves_the_columns_of_earlier_ones(fabric):
    method, images = der(fabric), make_task(0).test[0]
    method.learn(make_task(0))
    before = method.features([images])

    def fail(at):
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        method.learn(make_task(10), on_epoch=fail)
    assert torch.equal(method.features([images]), before)
    assert len(method.model.backbone.columns) == 1


def test_it_remembers_what_finetuning_forgets(fabric):
    train, balance = (cps.Training(epochs, cps.Adam(1e-2), batch_size=16) for epochs in (10, 5))
    method, tasks = der(fabric, train=train, balance=balance), [make_task(10 * index, images=48) for index in range(3)]
    for task in tasks:
        method.learn(task)
    images, labels = tasks[0].test
    assert sum(a == b for a, b in zip(method.predict(images).classes, labels, strict=True)) > 9
