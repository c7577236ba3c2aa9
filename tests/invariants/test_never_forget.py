"""Invariant 1: the outputs of a sealed subnetwork never change, to the bit. Invariant 2: masks only shrink."""

import itertools

import pytest
import torch

import cps
from cps.network.draft import Draft
from cps.network.masks import is_subset
from cps.network.shared import SharedNetwork
from cps.runtime.devices import make_fabric
from samples import ACCELERATOR, make_task

OPTIMIZERS = {
    "sgd": cps.SGD(0.1, momentum=0.9, weight_decay=1e-2),
    "adam": cps.Adam(1e-2, weight_decay=1e-2),
    "adamw": cps.AdamW(1e-2, weight_decay=0.1),
}


def learn_and_compare(learner, tasks=3):
    """Learn tasks; return whether the outputs of task 0 are the same bits as right after it was learned."""
    first = make_task(0)
    images = first.test[0].to(learner.network.device)

    def outputs():
        learner.network.clear_compact()
        return *learner.evidence(images)[0], *learner.network.full_outputs([images], 0)

    learner.learn(first)
    before = outputs()
    for index in range(1, tasks):
        learner.learn(make_task(10 * index))
    return all(map(torch.equal, before, outputs()))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_old_logits_stay_identical_with_every_optimizer(make_learner, name):
    training = cps.Training(3, OPTIMIZERS[name], batch_size=8)
    assert learn_and_compare(make_learner(train=training, retrain=training))


def test_old_logits_stay_identical_in_mixed_precision(make_learner):
    fabric = make_fabric(accelerator=ACCELERATOR, precision="bf16-mixed")
    assert learn_and_compare(make_learner(fabric=fabric))


def test_old_logits_stay_identical_after_save_and_load_and_more_learning(make_learner, tmp_path):
    learner = make_learner()
    first = make_task(0)
    learner.learn(first)
    before = learner.evidence(first.test[0])[0].logits
    learner.save(tmp_path / "model.cps")
    loaded = cps.load(tmp_path / "model.cps", learner.network.backbone, fabric=learner.fabric)
    loaded.learn(make_task(10))
    assert torch.equal(before, loaded.evidence(first.test[0])[0].logits)


def test_fingerprints_never_change(make_learner):
    learner = make_learner()
    fingerprints = []
    for index in range(3):
        learner.learn(make_task(10 * index))
        fingerprints.append(learner.fingerprint(index))
        assert [learner.fingerprint(task) for task in range(index + 1)] == fingerprints
    assert len(set(fingerprints)) == 3


def test_negative_control_sealing_over_taken_weights_is_detected(make_learner, monkeypatch):
    def wrong_seal(network: SharedNetwork, *args, **settings):
        network.taken = {name: torch.zeros_like(mask) for name, mask in network.taken.items()}
        return seal(network, *args, **settings)

    seal = SharedNetwork.seal
    monkeypatch.setattr(SharedNetwork, "seal", wrong_seal)
    monkeypatch.setattr(Draft, "guard", lambda self: {})
    learner = make_learner()
    with pytest.raises(RuntimeError, match="sealed weights of '0.weight' would have changed; nothing was learned"):
        learn_and_compare(learner)
    assert len(learner.network.subnetworks) == 1  # the first task, unchanged
    learner.network.check_sealed()
    monkeypatch.setattr("cps.learner.find_changed", lambda *_: None)
    assert not learn_and_compare(make_learner())


def test_a_sealed_subnetwork_that_was_changed_from_outside_is_not_saved(make_learner, tmp_path):
    learner, path = make_learner(), tmp_path / "model.cps"
    learner.learn(make_task(0))
    learner.save(path)
    before = path.read_bytes()
    next(iter(learner.network.weights.values())).add_(1.0)
    with pytest.raises(RuntimeError, match="has changed since it was sealed"):
        learner.save(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_sealed_subnetwork_is_the_one_that_was_trained(make_learner, monkeypatch, name):
    """Taken weights must have their sealed values during training, since the new task is fitted to them."""
    training = cps.Training(3, OPTIMIZERS[name], batch_size=8)
    assert trained_equals_sealed(make_learner(train=training, retrain=training), monkeypatch)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_negative_control_masking_gradients_is_not_enough(make_learner, monkeypatch, name):
    """Weight decay and momentum move weights whose gradient is zero."""
    monkeypatch.setattr(Draft, "guard", lambda self: {})
    training = cps.Training(3, OPTIMIZERS[name], batch_size=8)
    learner = make_learner(train=training, retrain=training)
    assert not trained_equals_sealed(learner, monkeypatch, each_draft=mask_gradients)


def mask_gradients(draft):
    """Set the gradient of taken and pruned weights to zero, which does not protect them."""
    for name, parameter in draft.model.backbone.named_parameters():
        if name in draft.masks and draft._taken[name].any():
            parameter.register_hook(
                lambda gradient, name=name: gradient.masked_fill(draft._taken[name] | ~draft.masks[name], 0.0)
            )


def trained_equals_sealed(learner, monkeypatch, each_draft=lambda draft: None):
    drafts = []
    new_draft = SharedNetwork.new_draft

    def record(*args, **settings):
        drafts.append(new_draft(*args, **settings))
        each_draft(drafts[-1])
        return drafts[-1]

    monkeypatch.setattr(SharedNetwork, "new_draft", record)
    learner.learn(make_task(0))
    second = make_task(10)
    learner.learn(second)
    images = second.test[0].to(learner.network.device)
    with torch.no_grad():
        live = drafts[-1].model.eval()(images)
    return torch.equal(live, learner.network.full_outputs([images], 1).logits)


def test_masks_only_shrink_and_taken_only_grows(make_learner, monkeypatch):
    steps = []
    prune = Draft.prune
    monkeypatch.setattr(Draft, "prune", lambda self, masks: steps.append((masks, self.masks)) or prune(self, masks))
    assert taken_only_grows(make_learner(rounds=3, capacity=cps.Capacity(min_free=0.0)))
    assert len(steps) == 9
    assert all(is_subset(after, before) for after, before in steps)


def taken_only_grows(learner):
    taken = [learner.network.taken]
    for index in range(3):
        learner.learn(make_task(10 * index))
        taken.append(learner.network.taken)
    return all(is_subset(before, after) for before, after in itertools.pairwise(taken))


def test_negative_control_a_seal_that_takes_only_the_last_masks_is_detected(make_learner, monkeypatch):
    def wrong_seal(network, draft, *args, **settings):
        subnetwork = seal(network, draft, *args, **settings)
        network.taken = draft.masks
        return subnetwork

    seal = SharedNetwork.seal
    monkeypatch.setattr(SharedNetwork, "seal", wrong_seal)
    monkeypatch.setattr("cps.learner.find_changed", lambda *_: None)
    assert not taken_only_grows(make_learner(rounds=3))


def test_a_pruner_that_switches_connections_on_raises(make_learner):
    class SwitchesOn:
        def __call__(self, backbone, masks, batches):
            self.calls = getattr(self, "calls", 0) + 1
            return {name: torch.full_like(mask, self.calls == 2) for name, mask in masks.items()}

    learner = make_learner(pruner=SwitchesOn(), rounds=2)
    with pytest.raises(ValueError, match="only switch connections off"):
        learner.learn(make_task(0))
    assert learner.network.subnetworks == []


def test_pruned_free_weights_return_to_their_values_after_dense_training(make_learner, monkeypatch):
    dense = []
    end = Draft.end_dense_training
    monkeypatch.setattr(Draft, "end_dense_training", lambda self: end(self) or dense.append(self.dense_weights))
    learner = make_learner(rounds=2)
    subnetwork = learner.learn(make_task(0))
    for name, weight in learner.network.weights.items():
        off = ~subnetwork.masks[name].expand_as(weight)
        assert torch.equal(weight[off], dense[0][name][off])
    assert any(not mask.all() for mask in subnetwork.masks.values())


def test_a_failed_task_leaves_the_learner_as_it_was(make_learner):
    learner = make_learner()
    learner.learn(make_task(0))
    before, taken = learner.fingerprint(0), learner.network.taken
    learner.on_epoch = lambda progress: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        learner.learn(make_task(10))
    learner.on_epoch = None
    assert learner.fingerprint(0) == before
    assert learner.network.taken is taken
    assert len(learner.network.subnetworks) == 1
    interrupted = learner.learn(make_task(10))
    fresh = make_learner()
    fresh.learn(make_task(0))
    assert all(torch.equal(interrupted.masks[n], m) for n, m in fresh.learn(make_task(10)).masks.items())
    assert learner.fingerprint(1) == fresh.fingerprint(1)


def test_a_selector_that_fails_undoes_the_task(make_learner):
    class Failing(cps.MaxOutput):
        def observe(self, subnetwork, evidence, labels, earlier):
            raise RuntimeError("no")

    learner = make_learner()
    learner.learn(make_task(0))
    before, taken = learner.fingerprint(0), learner.network.taken
    weights = dict(learner.network.weights)
    learner.configure(selectors=(Failing(),))
    with pytest.raises(RuntimeError, match="no"):
        learner.learn(make_task(10))
    assert learner.fingerprint(0) == before
    assert learner.network.taken is taken
    assert all(torch.equal(value, weights[name]) for name, value in learner.network.weights.items())


def test_a_failed_first_task_does_not_fix_the_shape_of_images(make_learner):
    learner = make_learner(train=cps.Training(2, cps.SGD(1e30), batch_size=16))
    with pytest.raises(FloatingPointError):
        learner.learn(make_task(0))
    assert learner.network.input_shape is None
