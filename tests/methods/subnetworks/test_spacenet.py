"""SpaceNet: sparse connections that move, and neurons that are reserved."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from method_samples import QUICK
from torch import nn

import cps
from cps.methods.blocks.memory import Memory
from cps.methods.subnetworks.spacenet import SpaceNet, SparseConnections
from cps.network.classifier import Classifier
from samples import conv_net, make_task


def method_of(fabric, backbone=None, **settings):
    torch.manual_seed(0)
    return SpaceNet(backbone or conv_net(), fabric=fabric, **{"train": QUICK, "selected": 0.4, **settings})


def learned(fabric, tasks=2, **settings):
    method = method_of(fabric, **settings)
    for index in range(tasks):
        method.learn(make_task(10 * index))
    return method


@pytest.mark.parametrize("optimizer", [cps.SGD(0.05, weight_decay=1e-2), cps.Adam(1e-2, weight_decay=1e-2)])
def test_connections_of_old_tasks_never_change_and_belong_to_one_task(fabric, optimizer):
    method = method_of(fabric, train=cps.Training(4, optimizer, batch_size=8))
    for index in range(3):
        before = {name: weight.detach().clone() for name, weight in method.model.named_parameters()}
        owners = {name: owner.clone() for name, owner in method.owners.items()}
        method.learn(make_task(10 * index))
        for name, owner in owners.items():
            weight = dict(method.model.backbone.named_parameters())[name]
            assert torch.equal(method.owners[name][owner > 0], owner[owner > 0])
            old = (owner > 0).expand_as(weight)
            assert torch.equal(weight[old], before[f"backbone.{name}"][old])
            assert (weight[(method.owners[name] == 0).expand_as(weight)] == 0).all()
            assert (method.owners[name] == index + 1).any()
        if index:
            assert torch.equal(method.model.head.weight[: 2 * index], before["head.weight"])
            assert not torch.equal(method.model.head.weight[2 * index :], before["head.weight"][-2:])


def test_tasks_have_the_same_number_of_connections_as_long_as_there_is_room(fabric):
    method = learned(fabric, tasks=2, selected=0.5, density=0.5)
    assert [int((method.owners["3.weight"] == owner).sum()) for owner in (1, 2)] == [12, 12]  # half of 4 x 6
    method = learned(fabric, tasks=1, selected=0.5, density=0.01)
    assert int((method.owners["3.weight"] == 1).sum()) == 6  # one for each neuron


def test_reserved_neurons_get_no_more_incoming_connections(fabric):
    method = learned(fabric, tasks=1, reserved=0.3)
    closed = {group: value.clone() for group, value in method.buffers.items() if group.startswith("reserved/")}
    owners = {name: owner.clone() for name, owner in method.owners.items()}
    method.learn(make_task(10))
    for name, (_, target) in method.channels.layers.items():
        rows = closed[f"reserved/{target}"]
        assert int(rows.sum()) == round(0.3 * len(rows))
        assert not torch.equal(method.owners[name], owners[name])
        assert torch.equal(method.owners[name][rows], owners[name][rows])


def make_objective(**settings):
    """Two layers, 4 -> 3 -> 2 neurons, of which the task may use all."""
    backbone = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False))
    owners = {"0.weight": torch.zeros(3, 4, dtype=torch.uint8), "1.weight": torch.zeros(2, 3, dtype=torch.uint8)}
    layers = {"0.weight": ("images", "hidden"), "1.weight": ("hidden", "features")}
    chosen = {"hidden": torch.ones(3, dtype=torch.bool), "features": torch.ones(2, dtype=torch.bool)}
    student = Classifier(backbone, nn.Linear(2, 2))
    objective = SparseConnections(student, layers, owners, chosen, **{"dropped": 0.5, **settings})
    objective.allocate(0.5, torch.Generator().manual_seed(0))
    return objective


def test_the_importance_of_a_connection_is_the_sum_of_changes_times_gradients():
    objective = make_objective()
    weight = objective.weights["0.weight"]
    before = weight.detach().clone()
    for change, gradient in ((0.5, 2.0), (-0.25, 4.0)):
        weight.grad = torch.full_like(weight, gradient)
        objective.before_step()
        assert torch.equal(weight.grad, gradient * objective.connections["0.weight"])
        with torch.no_grad():
            weight += change * objective.connections["0.weight"]
        objective.after_step()
    expected = 2.0 * objective.connections["0.weight"]
    torch.testing.assert_close(objective.importance["0.weight"], expected.float())
    assert not torch.equal(weight, before)
    per_neuron = objective.neuron_importance()
    torch.testing.assert_close(per_neuron["hidden"], expected.sum(dim=1).float())
    assert per_neuron["features"].tolist() == [0.0, 0.0]


def test_the_least_important_connections_make_room_between_important_neurons():
    objective = make_objective()
    objective.chosen["hidden"][2] = False
    objective.connections["0.weight"].copy_(torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]]))
    objective.importance["0.weight"].copy_(torch.tensor([[1.0, 5.0, 0, 0], [0, 2.0, 4.0, 0], [0, 0, 0, 0]]))
    objective.connections["1.weight"].copy_(torch.tensor([[1, 0, 0], [0, 1, 0]]))
    objective.importance["1.weight"].copy_(torch.tensor([[3.0, 0, 0], [0, 1.0, 0]]))
    with torch.no_grad():
        objective.weights["0.weight"].copy_(objective.connections["0.weight"])
    objective.rewire()
    # neurons have 6 and 6, images 1, 7, 4 and 0: places (0, 2) with 24, (1, 0) with 6, (0, 3) and (1, 3) with 0
    assert objective.connections["0.weight"].tolist() == [
        [False, True, True, False],
        [True, False, True, False],
        [False, False, False, False],
    ]
    assert objective.weights["0.weight"].tolist() == [[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0] * 4]
    assert objective.importance["0.weight"].tolist() == [[0.0, 5.0, 0.0, 0.0], [0.0, 0.0, 4.0, 0.0], [0.0] * 4]
    # hidden neurons have 6 and 6, features 3 and 1: of the places (0, 1) with 18 and (1, 0) with 6, the first
    assert objective.connections["1.weight"].tolist() == [[True, True, False], [False, False, False]]
    for name, connections in objective.connections.items():
        assert torch.equal(objective.off[name], ~connections)


def test_without_drops_the_connections_are_those_drawn(fabric):
    drawn = learned(fabric, tasks=1, train=replace(QUICK, epochs=1)).owners
    still, moved = (learned(fabric, tasks=1, dropped=dropped).owners for dropped in (0.0, 0.5))
    assert all(torch.equal(drawn[name], still[name]) for name in drawn)
    assert not all(torch.equal(drawn[name], moved[name]) for name in drawn)
    assert [int(owner.sum()) for owner in moved.values()] == [int(owner.sum()) for owner in drawn.values()]


def test_the_loss_is_over_all_classes_with_zeros_for_those_of_other_tasks():
    objective = make_objective(old=1, total_classes=5)
    pixels, labels = torch.randn(3, 4), torch.tensor([1, 1, 1])
    logits = objective.student(pixels)
    full = torch.cat([torch.zeros(3, 1), logits[:, 1:], torch.zeros(3, 3)], dim=1)
    loss = objective(pixels, labels, lambda features, logits, labels: F.cross_entropy(logits, labels))
    torch.testing.assert_close(loss, F.cross_entropy(full, labels))


def test_norm_layers_and_biases_belong_to_the_first_task_that_selects_a_neuron(fabric):
    method = learned(fabric, tasks=1)
    known, came = method.buffers[f"known/{method.channels.private['1.weight']}"], conv_net()[1]
    norm = method.model.backbone[1]
    assert 0 < int(known.sum()) < len(known)
    for name in ("weight", "bias"):
        assert torch.equal(getattr(norm, name)[~known].cpu(), getattr(came, name)[~known.cpu()])
        assert not torch.equal(getattr(norm, name)[known].cpu(), getattr(came, name)[known.cpu()])
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    method.learn(make_task(10))
    for name in ("weight", "bias"):
        assert torch.equal(getattr(norm, name)[known], before[name][known])
        assert not torch.equal(getattr(norm, name), before[name])
    assert torch.equal(norm.running_mean.cpu(), came.running_mean)
    assert torch.equal(norm.running_var.cpu(), came.running_var)


def test_it_keeps_the_contract_of_methods(fabric):
    cps.check_method(lambda backbone: SpaceNet(backbone, train=QUICK, fabric=fabric))


def test_it_learns_tasks_and_keeps_most_of_their_accuracy_with_the_task_known(fabric):
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(72, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU())
    training = cps.Training(10, cps.Adam(3e-3), batch_size=16)
    method = SpaceNet(backbone, tasks=3, train=training, fabric=fabric)
    tasks = [make_task(10 * index, images=48) for index in range(3)]
    for task in tasks:
        method.learn(task)
    right = [
        sum(a == b for a, b in zip(method.predict(task.test[0], task=i).classes, task.test[1], strict=True))
        for i, task in enumerate(tasks)
    ]
    assert sum(right) > 32  # of 36


def test_it_reserves_as_many_neurons_as_the_number_of_tasks_allows(fabric):
    method = learned(fabric, tasks=2, reserved=0.5)
    with pytest.raises(ValueError, match="has no neurons left for another task"):
        method.learn(make_task(20))
    assert method.classes == [(0, 1), (10, 11)]
    method = method_of(fabric, tasks=8)
    for index in range(8):
        method.learn(make_task(10 * index))
    assert all(int(marks.sum()) == 8 for name, marks in method.buffers.items() if name.startswith("reserved/"))
    with pytest.raises(ValueError, match="neurons for 9 tasks, but a layer has only 8"):
        method_of(fabric, tasks=9).learn(make_task())


def test_it_keeps_the_network_and_the_owners_of_connections(fabric):
    method = learned(fabric, tasks=2)
    connections = 8 * 2 + 12 * 8
    assert method.kept()["masks"] == connections * 2 // 8 + 2 * 8 // 8 + 2 * 12 // 8
    assert set(method.kept()) == {"weights", "masks"}


@pytest.mark.parametrize("settings", [{"selected": 0.0}, {"density": 1.5}, {"dropped": 1.0}, {"memory": Memory(10)}])
def test_bad_settings_are_refused(fabric, settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        method_of(fabric, **settings)
