"""MAS: importances from the sensitivity of the outputs."""

import torch
from method_samples import QUICK, learn_two_tasks, make, same_trajectory

import cps
from cps.methods.regularization.importance import flat_parameters, output_sensitivity
from cps.methods.regularization.mas import MAS
from cps.methods.regularization.separate_heads import SeparateHeads
from samples import make_task


def test_it_keeps_the_contract_of_methods(fabric):
    cps.check_method(lambda backbone: MAS(backbone, train=QUICK, images=8, fabric=fabric))


def test_without_strength_it_is_finetuning_of_separate_heads_to_the_bit(fabric):
    tasks = [make_task(10 * index) for index in range(3)]
    assert same_trajectory(make(MAS, fabric, strength=0.0, images=8), make(SeparateHeads, fabric), tasks)
    assert not same_trajectory(make(MAS, fabric, images=8), make(SeparateHeads, fabric), tasks)


def test_importances_add_up_over_tasks_and_need_no_labels(fabric):
    method = make(MAS, fabric)
    first, second = make_task(0), make_task(10)
    method.learn(first)
    earlier = method.buffers["importance"].clone()
    method.learn(second)
    images = second.train[0].to(fabric.device)
    expected = earlier + output_sensitivity(method.model.eval(), [images.flip(0)])  # the order does not matter
    torch.testing.assert_close(method.buffers["importance"], expected, rtol=1e-3, atol=1e-6)


def test_it_holds_old_scores_and_learns_the_new_task(fabric):
    train = cps.Training(10, cps.Adam(1e-2), batch_size=16)
    free, _ = learn_two_tasks(make(SeparateHeads, fabric, train=train))
    held, accuracy = learn_two_tasks(make(MAS, fabric, train=train))
    assert held < free / 2
    assert accuracy > 0.8


def test_it_keeps_one_vector_as_large_as_the_backbone_and_one_more_while_it_learns(fabric):
    method = make(MAS, fabric, images=8)
    method.learn(make_task(0))
    size = flat_parameters(method.model.backbone).nbytes
    assert method.kept()["statistics"] == size
    assert method.kept(learning=True)["copies"] == size
