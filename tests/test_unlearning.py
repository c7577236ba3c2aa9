"""Unlearning: a forgotten task is gone from memory and file, and nothing else has changed."""

import pytest
import torch
from safetensors.torch import load_file

import cps
from cps.network.masks import count_users, is_subset
from samples import ACCELERATOR, Counts, conv_net, make_task

TASKS = 3
BY_CHANCE = 0 if ACCELERATOR == "cpu" else 3  # values of other tasks that may equal those of a forgotten one


@pytest.fixture
def learner(make_learner):
    """Return a learner of three tasks, each with its own notes and class names."""
    # A space of few numbers, so that none of its sums is by chance one of the values that must be gone.
    selectors = (cps.Fusion(cps.SharedSpace(cps.RandomReLU(8))), cps.MaxOutput())
    learner = make_learner(pruner=cps.Magnitude(0.4), rounds=2, selectors=selectors)
    for task in range(TASKS):
        images, labels = make_task(10 * task).train
        names = [f"secret-{task}-{label % 2}" for label in labels]
        learner.learn(cps.Task(sorted(set(names)), train=(images, names)))
        learner.annotate(task, **{"from": f"supplier-{task}"})
    return learner


def private_values(learner, task):
    """Return every float that only one task has: weights that no other task uses, head and private parameters."""
    network = learner.network
    others = [sub.masks for index, sub in enumerate(network.subnetworks) if index != task]
    subnetwork = network.subnetworks[task]
    values = []
    for name, weight in network.weights.items():
        exclusive = subnetwork.masks[name] & (count_users(others, name) == 0)
        values.append(weight[exclusive.expand_as(weight)])
    values += [v.flatten() for v in (*subnetwork.head.values(), *subnetwork.private.values()) if v.is_floating_point()]
    together = torch.cat(values)
    shared = torch.cat([value.flatten().float() for value in network.initial.values()])
    return together[~torch.isin(together, shared) & (together != 0)]


@pytest.mark.parametrize("task", range(TASKS))
def test_the_other_tasks_predict_the_same_bits(learner, task, tmp_path):
    rest = [index for index in range(TASKS) if index != task]
    before = [learner.fingerprint(index) for index in rest]
    images = make_task(0).test[0]
    predictions = [learner.predict(images, task=index) for index in rest]
    learner.forget(task)
    assert [learner.fingerprint(index) for index in range(2)] == before
    for index, prediction in enumerate(predictions):
        after = learner.predict(images, task=index)
        assert after.classes == prediction.classes
        assert torch.equal(after.confidence, prediction.confidence)
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
    assert found() == (
        len(secrets) + sum(map(len, old_free.values())),
        [True] * 3,
    )  # the search finds values that are there
    learner.forget(task)
    learner.save(path)
    values, names = found()
    assert values <= BY_CHANCE
    assert names == [False] * 3
    held = torch.cat([value.flatten().float() for value in learner.network.backbone.state_dict().values()])
    assert int(torch.isin(secrets, held).sum()) <= BY_CHANCE  # the backbone held the last trained weights


def test_weights_that_only_that_task_used_are_free_again(learner):
    network = learner.network
    network.subnetworks[1].masks["3.weight"].fill_(True)  # so that it has weights of its own
    network.taken["3.weight"].fill_(True)
    others = [network.subnetworks[index].masks for index in (0, 2)]
    kept = {name: count_users(others, name) > 0 for name in network.weights}
    assert not is_subset(network.taken, kept)
    learner.forget(1)
    assert all(torch.equal(network.taken[name], kept[name]) for name in kept)
    learner.learn(make_task(50))
    assert learner.predict(make_task(50).test[0]).classes


def test_the_only_task_can_be_forgotten_and_learned_again(make_learner, tmp_path):
    learner = make_learner()
    learner.learn(make_task(0))
    learner.forget(0)
    assert set(learner.network.free_by_layer().values()) == {1.0}
    with pytest.raises(RuntimeError, match="nothing has been learned"):
        learner.predict(make_task(0).test[0])
    learner.save(tmp_path / "model.cps")
    loaded = cps.load(tmp_path / "model.cps", conv_net(), fabric=learner.fabric)
    loaded.learn(make_task(0))
    assert len(loaded.network.subnetworks) == 1


def test_weights_that_the_user_froze_stay_taken_and_unchanged(make_learner, tmp_path):
    backbone = conv_net()
    backbone[0].weight.requires_grad_(False)
    learner = make_learner(backbone, pruner=cps.Magnitude(0.3))
    learner.learn(make_task(0))
    learner.save(tmp_path / "model.cps")
    loaded = cps.load(tmp_path / "model.cps", conv_net(), fabric=learner.fabric)  # frozen only in the file
    for one in (learner, loaded):
        before = one.network.weights["0.weight"].clone()
        one.forget(0)
        assert one.network.taken["0.weight"].all()
        assert torch.equal(one.network.weights["0.weight"], before)
        assert not one.network.taken["3.weight"].any()


@pytest.mark.slow
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
    with pytest.raises(ValueError, match="but '0.weight' is missing or differs in shape"):
        weights(fresh=conv_net(channels=5))


def test_free_weights_of_a_builtin_backbone_are_initialised_like_a_new_one(make_learner):
    learner = make_learner(cps.Architecture("small"))
    learner.learn(make_task(0, shape=(3, 6, 6)))
    learner.forget(0)
    drawn, new = learner.network.weights["layers.3.weight"], cps.SmallConvNet(3).layers[3].weight.detach()
    assert float(drawn.std()) == pytest.approx(float(new.std()), rel=0.1)


def test_a_task_that_was_not_learned_cannot_be_forgotten(learner):
    with pytest.raises(ValueError, match="below 3, the number of learned tasks, got 3"):
        learner.forget(3)


def test_statistics_of_selectors_that_are_not_in_use_are_dropped(make_learner):
    learner = make_learner()
    for first in (0, 10):
        learner.learn(make_task(first))
    learner.configure(selectors=(cps.MaxOutput(),))
    learner.forget(0)
    assert set(learner.network.subnetworks[0].statistics) == {"MaxOutput", "familiarity"}


def test_a_selector_whose_without_task_is_wrong_raises_and_changes_nothing(make_learner):
    class Same(Counts):
        def without_task(self, statistics, task):
            return statistics

    class Later(Same):
        name = "Later"  # one of the two comes before the cascade, the other after it

    learner = make_learner(selectors=[cps.Cascade(), Same(), Later()])
    for index in range(3):
        learner.learn(make_task(10 * index))
    names = ("Cascade", "Counts", "Later")
    before = {name: [dict(kept) for kept in learner.network.statistics(name)] for name in names}
    with pytest.raises(ValueError, match="Counts.without_task must return statistics of 2 tasks, got 3"):
        learner.forget(0)
    for name in names:
        for old, new in zip(before[name], learner.network.statistics(name), strict=True):
            assert all(old[key] is new[key] for key in old.keys() | new.keys())
