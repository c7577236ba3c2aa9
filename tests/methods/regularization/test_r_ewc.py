"""R-EWC: the penalty of EWC in rotated coordinates."""

import torch
from method_samples import QUICK, learn_two_tasks, make, same_trajectory

import cps
from cps.methods.regularization.eigenbasis import Basis
from cps.methods.regularization.ewc import EWC
from cps.methods.regularization.importance import flat_parameters
from cps.methods.regularization.r_ewc import REWC, RotatedPenalty, Term
from cps.methods.regularization.separate_heads import SeparateHeads
from cps.network.classifier import Classifier
from samples import make_task


class WithoutRotation(REWC):
    """R-EWC whose coordinates are those of the weights themselves."""

    def bases(self, model, batches, first):
        found = super().bases(model, batches, first)
        return {
            name: Basis(*(torch.eye(len(vectors)).to(vectors) for vectors in basis)) for name, basis in found.items()
        }


def test_it_keeps_the_contract_of_methods(fabric):
    cps.check_method(lambda backbone: REWC(backbone, train=QUICK, images=4, fabric=fabric))


def test_without_strength_it_is_finetuning_of_separate_heads_to_the_bit(fabric):
    tasks = [make_task(10 * index) for index in range(3)]
    assert same_trajectory(make(REWC, fabric, strength=0.0, images=4), make(SeparateHeads, fabric), tasks)


def test_without_rotation_it_is_ewc_to_the_bit(fabric):
    tasks, settings = [make_task(10 * index) for index in range(2)], {"strength": 50.0, "images": 8}
    ewc = make(EWC, fabric, **settings)
    assert same_trajectory(make(WithoutRotation, fabric, **settings), ewc, tasks)
    assert not same_trajectory(make(REWC, fabric, **settings), make(EWC, fabric, **settings), tasks)


def test_the_penalty_of_a_linear_layer_is_as_worked_by_hand():
    """W moves by (1 0; 0 0). With both bases turned by 45 degrees, U2^T dW U1 = (1 -1; -1 1) / 2, with squares of 1/4."""
    model = Classifier(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2))
    turn = torch.tensor([[1.0, -1.0], [1.0, 1.0]]) / 2**0.5
    fisher, anchor = torch.tensor([1.0, 2.0, 3.0, 4.0]), flat_parameters(model.backbone).detach().clone()
    objective = RotatedPenalty(model, 0, 0.5, [Term(fisher, anchor, {"weight": Basis(turn, turn)})])
    assert objective.penalty().item() == 0
    with torch.no_grad():
        model.backbone.weight[0, 0] += 1
    torch.testing.assert_close(objective.penalty(), torch.tensor(0.5 * (1 + 2 + 3 + 4) / 4))


def test_it_holds_old_scores_and_learns_the_new_task(fabric):
    train = cps.Training(10, cps.SGD(0.05), batch_size=16)
    free, _ = learn_two_tasks(make(SeparateHeads, fabric, train=train))
    held, accuracy = learn_two_tasks(make(REWC, fabric, train=train, strength=500.0))
    assert held < free / 2
    assert accuracy > 0.8


def test_it_keeps_a_term_of_each_task_and_continues_from_its_file(fabric, tmp_path):
    method, other = (make(REWC, fabric, images=4) for _ in range(2))
    for index in range(2):
        method.learn(make_task(10 * index))
        vectors = 2 * flat_parameters(method.model.backbone).nbytes
        assert method.kept()["statistics"] == (index + 1) * (vectors + 4 * (2**2 + 8**2 + 8**2 + 12**2))
    method.save(tmp_path / "method")
    other.load(tmp_path / "method")
    assert same_trajectory(method, other, [make_task(20)])
