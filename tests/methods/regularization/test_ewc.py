"""EWC: Fisher information and the penalty of several tasks."""

import pytest
import torch
from method_samples import QUICK, learn_two_tasks, make, same_trajectory

import cps
from cps.methods.regularization.ewc import EWC
from cps.methods.regularization.importance import exact_fisher, flat_parameters
from cps.methods.regularization.quadratic_penalty import Penalized
from cps.methods.regularization.separate_heads import SeparateHeads
from samples import make_task


def test_it_keeps_the_contract_of_methods(fabric):
    cps.check_method(lambda backbone: EWC(backbone, train=QUICK, images=4, fabric=fabric))


def test_without_strength_it_is_finetuning_of_separate_heads_to_the_bit(fabric):
    tasks = [make_task(10 * index) for index in range(3)]
    assert same_trajectory(make(EWC, fabric, strength=0.0, images=4), make(SeparateHeads, fabric), tasks)
    assert not same_trajectory(make(EWC, fabric, images=4), make(SeparateHeads, fabric), tasks)


class Watched(EWC):
    """EWC that keeps the Fisher information and the parameters after each task, as its equation has them."""

    def end_task(self, task):
        self.terms = getattr(self, "terms", [])
        model = self.model.eval()
        images = self.prepare(torch.cat([images for images, _ in task.examples.batches([torch.arange(24)])]))
        fisher = exact_fisher(model, [images.to(self.device)], task.old)
        self.terms.append((fisher, flat_parameters(model.backbone).detach().clone()))
        super().end_task(task)


def test_the_one_kept_term_has_the_gradient_of_the_terms_of_all_tasks(fabric):
    method = make(Watched, fabric)
    for index in range(3):
        method.learn(make_task(10 * index))
    now = flat_parameters(method.model.backbone).detach() + 0.1
    expected = sum(method.strength * fisher * (now - parameters) for fisher, parameters in method.terms)
    found = method.strength * method.buffers["importance"] * (now - method.buffers["anchor"])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    assert (method.buffers["importance"] >= 0).all()


def test_online_ewc_decays_the_fisher_and_holds_the_last_parameters(fabric):
    method = make(Watched, fabric, decay=0.5)
    for index in range(2):
        method.learn(make_task(10 * index))
    (first, _), (second, parameters) = method.terms
    torch.testing.assert_close(method.buffers["importance"], 0.5 * first + second)
    assert "anchor" not in method.buffers
    objective = Penalized(method.model, 0, 1.0, method.buffers["importance"])
    assert torch.equal(objective.anchor, parameters)


def test_with_a_huge_strength_important_weights_hardly_move(fabric):
    moves = []
    for strength in (0.0, 1e8):
        method = make(EWC, fabric, strength=strength, train=cps.Training(2, cps.Adam(1e-3), batch_size=16))
        method.learn(make_task(0))
        before, important = flat_parameters(method.model.backbone).detach().clone(), method.buffers["importance"] > 1e-6
        method.learn(make_task(10))
        moves.append((flat_parameters(method.model.backbone) - before).abs()[important].mean().item())
    assert moves[1] < moves[0] / 3


def test_it_holds_old_scores_and_learns_the_new_task(fabric):
    train = cps.Training(10, cps.SGD(0.05), batch_size=16)
    free, _ = learn_two_tasks(make(SeparateHeads, fabric, train=train))
    held, accuracy = learn_two_tasks(make(EWC, fabric, train=train))
    assert held < free / 2
    assert accuracy > 0.8


@pytest.mark.parametrize(("decay", "kept", "copies"), [(None, 2, 0), (1.0, 1, 1)])
def test_it_keeps_one_or_two_vectors_as_large_as_the_backbone(fabric, decay, kept, copies):
    method = make(EWC, fabric, decay=decay, images=4)
    for index in range(2):
        method.learn(make_task(10 * index))
        size = flat_parameters(method.model.backbone).nbytes
        assert method.kept()["statistics"] == kept * size
        assert method.kept(learning=True).get("copies", 0) == copies * size


def test_it_continues_from_its_file_as_if_it_had_never_stopped(fabric, tmp_path):
    method, other = (make(EWC, fabric, images=4) for _ in range(2))
    method.learn(make_task(0))
    method.save(tmp_path / "method")
    other.load(tmp_path / "method")
    assert same_trajectory(method, other, [make_task(10)])
    assert QUICK == method.train
