"""CPG: choice among old weights, and pruning as far as the goal allows."""

import pytest
import torch
from method_samples import QUICK

import cps
from cps.methods.subnetworks.cpg import CPG
from cps.methods.subnetworks.packnet import PackNet
from samples import conv_net, make_task

SHORT = cps.Training(1, cps.Adam(1e-2), batch_size=16)


def learned(fabric, kind=CPG, tasks=2, val=True, **settings):
    torch.manual_seed(0)
    method = kind(conv_net(), fabric=fabric, **{"train": QUICK, "retrain": SHORT, **settings})
    for index in range(tasks):
        task = make_task(10 * index)
        method.learn(cps.Task(task.classes, train=task.train, val=task.test if val else None))
    return method


def test_with_all_choices_on_and_one_step_it_is_packnet_to_the_bit(fabric):
    still = cps.SGD(0.0, weight_decay=0.0)
    one = learned(fabric, steps=1, sparsity=0.5, margin=1.0, score_optimizer=still)
    other = learned(fabric, PackNet, prune=0.5)
    assert [one.fingerprint(task) for task in range(2)] == [other.fingerprint(task) for task in range(2)]
    chosen = learned(fabric, steps=1, sparsity=0.5, margin=1.0, score_optimizer=cps.Adam(1e-2, weight_decay=0.0))
    assert chosen.fingerprint(0) == other.fingerprint(0)
    assert chosen.fingerprint(1) != other.fingerprint(1)


@pytest.mark.parametrize(
    ("accuracies", "steps"), [([0.9, 0.9, 0.88, 0.9], 1), ([0.9, 0.9, 0.95, 0.9], 3), ([0.9, 0, 0, 0], 0)]
)
def test_the_sparsest_draft_that_meets_the_goal_is_kept(fabric, monkeypatch, accuracies, steps):
    """The third one is below the goal, so the step is undone; later ones train, but prune no more."""
    measured = iter(accuracies)
    monkeypatch.setattr(CPG, "accuracy", lambda self, examples: next(measured))
    method = learned(fabric, tasks=1, steps=3, sparsity=0.9, margin=0.0)
    assert method.network.density(0) == pytest.approx(1 - 0.3 * steps, abs=0.01)
    assert method.buffers == {}
    assert "scores" not in method.kept()


def test_what_is_held_out_comes_from_the_training_images_unless_given(fabric):
    method = learned(fabric, tasks=1, val=False, steps=1, validation=0.25)
    assert method.image_passes == (QUICK.epochs + SHORT.epochs) * 18
    assert learned(fabric, tasks=1, steps=1).image_passes == (QUICK.epochs + SHORT.epochs) * 24


@pytest.mark.parametrize(
    ("change", "match"),
    [({"sparsity": 1.0}, "sparsity must be"), ({"validation": 0.0}, "validation"), ({"steps": 0}, "steps")],
)
def test_wrong_settings_raise(fabric, change, match):
    with pytest.raises(ValueError, match=match):
        CPG(conv_net(), fabric=fabric, **change)
