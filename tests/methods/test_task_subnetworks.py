"""The frame of methods with a subnetwork for each task, and what holds for all of them."""

import pytest
import torch
from method_samples import QUICK

import cps
from cps.methods.subnetworks.clnp import CLNP
from cps.methods.subnetworks.cpg import CPG
from cps.methods.subnetworks.packnet import PackNet
from cps.methods.subnetworks.piggyback import Piggyback
from cps.methods.subnetworks.supsup import SupSup
from cps.methods.subnetworks.wsn import WSN
from cps.methods.task_subnetworks import TaskSubnetworks
from samples import conv_net, make_task

METHODS = {
    "packnet": (PackNet, {"retrain": QUICK}),
    "packnet with shared norms": (PackNet, {"retrain": QUICK, "shared_norms": True}),
    "piggyback": (Piggyback, {"mask_train": QUICK}),
    "supsup": (SupSup, {}),
    "clnp": (CLNP, {}),
    "cpg": (CPG, {"retrain": QUICK, "steps": 2}),
    "wsn": (WSN, {}),
}
OPTIMIZERS = {
    "sgd": cps.SGD(0.05, momentum=0.9, weight_decay=1e-2),
    "adam": cps.Adam(1e-2, weight_decay=1e-2),
}


def make(name, fabric, **settings):
    torch.manual_seed(0)
    kind, own = METHODS[name]
    return kind(conv_net(), fabric=fabric, **{"train": QUICK, **own, **settings})


@pytest.mark.parametrize("name", METHODS)
def test_every_method_keeps_the_contract(name, fabric):
    kind, own = METHODS[name]
    cps.check_method(lambda backbone: kind(backbone, train=QUICK, fabric=fabric, **own))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", METHODS)
def test_old_fingerprints_stay_identical_with_every_optimizer(name, optimizer, fabric):
    training = cps.Training(2, OPTIMIZERS[optimizer], batch_size=8)
    settings = {each: training for each in ("train", "retrain", "mask_train") if hasattr(METHODS[name][0], each)}
    method = make(name, fabric, **settings)
    fingerprints = []
    for index in range(3):
        method.learn(make_task(10 * index, images=16))
        fingerprints.append(method.fingerprint(index))
        assert [method.fingerprint(task) for task in range(index + 1)] == fingerprints
    assert len(set(fingerprints)) == 3


def test_negative_control_without_the_guard_a_method_fails(fabric, monkeypatch):
    monkeypatch.setattr(TaskSubnetworks, "guard", lambda self: {})
    monkeypatch.setattr(cps.SharedNetwork, "_take_weights", take_all)
    method = make("packnet", fabric)
    method.learn(make_task(0))
    with pytest.raises(RuntimeError, match="sealed weights of '0.weight' would have changed; nothing was learned"):
        method.learn(make_task(10))
    assert method.classes == [(0, 1)]


def take_all(network, draft):
    """Write all weights of a draft into the network, the taken ones too."""
    network.weights = {name: weight.clone() for name, weight in draft.weights().items()}
    network.taken = {name: network.taken[name] | mask for name, mask in draft.masks.items()}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_continues_from_its_file_as_if_it_had_never_stopped(name, fabric, tmp_path):
    whole, other = make(name, fabric), make(name, fabric)
    whole.learn(make_task(0))
    whole.save(tmp_path / "method")
    other.load(tmp_path / "method")
    assert (other.classes, other.image_passes, other.kept()) == (whole.classes, whole.image_passes, whole.kept())
    for method in (whole, other):
        method.learn(make_task(10))
    assert [other.fingerprint(task) for task in range(2)] == [whole.fingerprint(task) for task in range(2)]


def test_a_file_of_a_method_with_other_settings_is_refused(fabric, tmp_path):
    method = make("packnet", fabric)
    method.learn(make_task(0))
    method.save(tmp_path / "method")
    with pytest.raises(ValueError, match="has another method or other settings"):
        make("packnet", fabric, prune=0.25).load(tmp_path / "method")


@pytest.mark.parametrize("passes", [0.5, 3.0])
@pytest.mark.parametrize("name", METHODS)
def test_with_a_budget_every_task_sees_the_same_number_of_images(name, passes, fabric):
    method = make(name, fabric, passes=passes)
    for index in range(2):
        before = method.image_passes
        method.learn(make_task(10 * index))
        assert passes * 24 <= method.image_passes - before < passes * 24 + 3 * QUICK.batch_size


def test_selectors_of_the_library_select_the_tasks(fabric):
    training = cps.Training(10, cps.Adam(1e-2), batch_size=16)
    selectors = (cps.MaxOutput(), cps.Cascade(), cps.Fusion())
    method = make("packnet", fabric, train=training, retrain=training, selectors=selectors)
    tasks = [make_task(10 * index, images=48) for index in range(3)]
    for task in tasks:
        method.learn(task)
    for selector in selectors:
        found = [method.predict(task.test[0], selector=selector, group_size=4) for task in tasks]
        assert sum((each.tasks == index).float().mean() for index, each in enumerate(found)) > 2
    for index, task in enumerate(tasks):
        assert method.predict(task.test[0], task=index).classes == task.test[1]


def test_shared_norms_are_those_of_the_first_task(fabric):
    method = make("packnet with shared norms", fabric)
    for index in range(2):
        method.learn(make_task(10 * index))
    first, second = (each.private for each in method.network.subnetworks)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    private = make("packnet", fabric)
    for index in range(2):
        private.learn(make_task(10 * index))
    assert private.kept()["weights"] - method.kept()["weights"] == sum(value.nbytes for value in first.values())


def test_bad_tasks_raise_and_change_nothing(fabric):
    method = make("packnet", fabric)
    with pytest.raises(RuntimeError, match="nothing has been learned yet"):
        method.evidence(torch.zeros(1, 2, 6, 6))
    method.learn(make_task(0))
    images, labels = make_task(10).train
    for task, match in (
        (make_task(0), "already learned, in task 0"),
        (cps.Task([5], train=(images, [5] * 24)), r"needs two classes or more, got \[5\]"),
        (cps.Task([10, 11], train=(images[:, :1], labels)), "images must have shape"),
    ):
        with pytest.raises(ValueError, match=match):
            method.learn(task)
    assert method.classes == [(0, 1)]
    assert len(method.network.subnetworks) == 1
