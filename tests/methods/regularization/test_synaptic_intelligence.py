"""Synaptic intelligence: importances from the path of training."""

import torch
from method_samples import QUICK, learn_two_tasks, make, same_trajectory

import cps
from cps.methods.regularization.importance import flat_parameters
from cps.methods.regularization.separate_heads import SeparateHeads
from cps.methods.regularization.synaptic_intelligence import SynapticIntelligence
from samples import make_task


def test_it_keeps_the_contract_of_methods(fabric):
    cps.check_method(lambda backbone: SynapticIntelligence(backbone, train=QUICK, fabric=fabric))


def test_the_first_task_is_finetuning_and_without_strength_all_are(fabric):
    tasks = [make_task(10 * index) for index in range(3)]
    assert same_trajectory(make(SynapticIntelligence, fabric), make(SeparateHeads, fabric), tasks[:1])
    assert same_trajectory(make(SynapticIntelligence, fabric, strength=0.0), make(SeparateHeads, fabric), tasks)
    assert not same_trajectory(make(SynapticIntelligence, fabric), make(SeparateHeads, fabric), tasks)


def test_the_importance_of_one_step_is_as_worked_by_hand(fabric):
    """One step of SGD moves by -lr g, so omega = lr g^2, and Omega = omega / ((lr g)^2 + damping)."""
    train = cps.Training(1, cps.SGD(0.5, momentum=0.0, weight_decay=0.0), batch_size=24)
    method = make(SynapticIntelligence, fabric, train=train, damping=0.2)
    start = flat_parameters(method.model.backbone).detach().clone()
    method.learn(make_task(0))
    gradient = (start - flat_parameters(method.model.backbone).detach()) / 0.5
    expected = 0.5 * gradient.square() / ((0.5 * gradient).square() + 0.2)
    torch.testing.assert_close(method.buffers["importance"], expected, rtol=1e-3, atol=1e-6)


def test_importances_add_up_over_tasks_and_are_never_negative(fabric):
    method, earlier = make(SynapticIntelligence, fabric), 0
    for index in range(3):
        method.learn(make_task(10 * index))
        added = method.buffers["importance"] - earlier
        assert (added >= 0).all()
        assert added.max() > 0
        earlier = method.buffers["importance"]


def test_it_holds_old_scores_and_learns_the_new_task(fabric):
    train = cps.Training(10, cps.SGD(0.05), batch_size=16)
    free, _ = learn_two_tasks(make(SeparateHeads, fabric, train=train))
    held, accuracy = learn_two_tasks(make(SynapticIntelligence, fabric, train=train, strength=10.0))
    assert held < free * 0.7
    assert accuracy > 0.8


def test_it_keeps_one_vector_as_large_as_the_backbone_and_two_more_while_it_learns(fabric):
    method = make(SynapticIntelligence, fabric)
    method.learn(make_task(0))
    size = flat_parameters(method.model.backbone).nbytes
    assert method.kept()["statistics"] == size
    assert method.kept(learning=True)["copies"] == 2 * size
