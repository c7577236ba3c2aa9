"""Forgetting on purpose: the task is gone from memory and file, and nothing else has changed."""

import pytest
import torch
from safetensors.torch import load_file

import cps
from cps.network.masks import is_subset, times_used
from samples import ACCELERATOR, conv_net, make_task

TASKS = 3
BY_CHANCE = 0 if ACCELERATOR == "cpu" else 3  # numbers of others that may be equal to some of a task's


@pytest.fixture
def learner(make_learner):
    """Return a learner of three tasks, each with notes and a class name of its own."""
    learner = make_learner(pruner=cps.Magnitude(0.4), rounds=2)
    for task in range(TASKS):
        images, labels = make_task(10 * task).train
        names = [f"secret-{task}-{label % 2}" for label in labels]
        found = learner.learn(cps.Task(sorted(set(names)), train=(images, names)))
        found.notes["from"] = f"supplier-{task}"
    return learner


def private_values(learner, task):
    """Return the bytes of every float that only one task has: of its own weights, head and private parts."""
    network = learner.network
    others = [sub.masks for index, sub in enumerate(network.subnetworks) if index != task]
    subnetwork = network.subnetworks[task]
    values = []
    for name, weight in network.weights.items():
        alone = subnetwork.masks[name] & (times_used(others, name) == 0)
        values.append(weight[alone.expand_as(weight)])
    values += [v.flatten() for v in (*subnetwork.head.values(), *subnetwork.private.values()) if v.is_floating_point()]
    together = torch.cat(values)
    shared = torch.cat([value.flatten().float() for value in network.initial.values()])
    return together[~torch.isin(together, shared) & (together != 0)]


@pytest.mark.parametrize("task", range(TASKS))
def test_the_other_tasks_answer_as_before_to_the_bit(learner, task, tmp_path):
    rest = [index for index in range(TASKS) if index != task]
    before = [learner.fingerprint(index) for index in rest]
    images = make_task(0).test[0]
    answers = [learner.predict(images, task=index) for index in rest]
    learner.forget(task)
    assert [learner.fingerprint(index) for index in range(2)] == before
    for index, answer in enumerate(answers):
        after = learner.predict(images, task=index)
        assert after.classes == answer.classes
        assert torch.equal(after.confidence, answer.confidence)
    learner.save(tmp_path / "model.cps")
    loaded = cps.load(tmp_path / "model.cps", conv_net(), fabric=learner.fabric)
    assert [loaded.fingerprint(index) for index in range(2)] == before


@pytest.mark.parametrize("task", range(TASKS))
def test_the_file_holds_nothing_that_only_that_task_had(learner, task, tmp_path):
    path = tmp_path / "model.cps"
    secrets = private_values(learner, task)
    old_free = {n: w[~learner.network.taken[n].expand_as(w)] for n, w in learner.network.weights.items()}
    words = [f"secret-{task}-0".encode(), f"secret-{task}-1".encode(), f"supplier-{task}".encode()]

    def found():
        tensors = load_file(path)
        floats = torch.cat([value.flatten() for value in tensors.values() if value.is_floating_point()])
        values = torch.cat([secrets, *old_free.values()]).cpu()
        return int(torch.isin(values, floats).sum()), [word in path.read_bytes() for word in words]

    learner.save(path)
    assert found() == (len(secrets) + sum(map(len, old_free.values())), [True] * 3)  # the search finds what is there
    learner.forget(task)
    learner.save(path)
    number, are_there = found()
    assert number <= BY_CHANCE
    assert are_there == [False] * 3
    held = torch.cat([value.flatten().float() for value in learner.network.backbone.state_dict().values()])
    assert int(torch.isin(secrets, held).sum()) <= BY_CHANCE  # the backbone held what was trained last


def test_weights_that_only_that_task_used_are_free_again(learner):
    network = learner.network
    network.subnetworks[1].masks["3.weight"].fill_(True)  # so that it owns some alone
    network.taken["3.weight"].fill_(True)
    others = [network.subnetworks[index].masks for index in (0, 2)]
    kept = {name: times_used(others, name) > 0 for name in network.weights}
    assert not is_subset(network.taken, kept)
    learner.forget(1)
    assert all(torch.equal(network.taken[name], kept[name]) for name in kept)
    learner.learn(make_task(50))
    assert learner.predict(make_task(50).test[0]).classes


def test_the_only_task_can_be_forgotten_and_learning_starts_anew(make_learner, tmp_path):
    learner = make_learner()
    learner.learn(make_task(0))
    learner.forget(0)
    assert set(learner.network.free().values()) == {1.0}
    with pytest.raises(RuntimeError, match="nothing has been learned"):
        learner.predict(make_task(0).test[0])
    learner.save(tmp_path / "model.cps")
    loaded = cps.load(tmp_path / "model.cps", conv_net(), fabric=learner.fabric)
    loaded.learn(make_task(0))
    assert len(loaded.network.subnetworks) == 1


def test_frozen_weights_of_the_user_stay_taken_and_unchanged(make_learner, tmp_path):
    backbone = conv_net()
    backbone[0].weight.requires_grad_(False)
    learner = make_learner(backbone, pruner=cps.Magnitude(0.3))
    learner.learn(make_task(0))
    learner.save(tmp_path / "model.cps")
    loaded = cps.load(tmp_path / "model.cps", conv_net(), fabric=learner.fabric)  # not frozen here, but in the file
    for one in (learner, loaded):
        before = one.network.weights["0.weight"].clone()
        one.forget(0)
        assert one.network.taken["0.weight"].all()
        assert torch.equal(one.network.weights["0.weight"], before)
        assert not one.network.taken["3.weight"].any()


def test_fresh_values_come_from_the_seed_or_from_a_given_backbone(make_learner):
    def weights(seed=0, fresh=None):
        learner = make_learner(seed=seed)
        learner.learn(make_task(0))
        learner.forget(0, fresh=fresh)
        return learner.network.weights["3.weight"].cpu()

    assert torch.equal(weights(), weights())
    assert not torch.equal(weights(), weights(seed=1))
    torch.manual_seed(7)
    given = conv_net()
    assert torch.equal(weights(fresh=given), given[3].weight)
    with pytest.raises(ValueError, match="no weight '0.weight' of the shape"):
        weights(fresh=conv_net(channels=5))


def test_a_builtin_backbone_is_drawn_as_a_new_one_would_be(make_learner):
    learner = make_learner(cps.Builtin("small"))
    learner.learn(make_task(0, shape=(3, 6, 6)))
    learner.forget(0)
    drawn, new = learner.network.weights["layers.3.weight"], cps.SmallConvNet(3).layers[3].weight.detach()
    assert float(drawn.std()) == pytest.approx(float(new.std()), rel=0.1)


def test_a_task_that_was_not_learned_cannot_be_forgotten(learner):
    with pytest.raises(ValueError, match="there is no task 3: 3 were learned"):
        learner.forget(3)
