"""A crowded network: a task learns which sealed weights to use, and changes none of them."""

import copy
import math

import pytest
import torch
from torch import nn

import cps
from cps.data.batch_transform import BatchTransform
from cps.data.examples import TensorExamples
from cps.network.classifier import Classifier
from cps.network.freezing import Kept, bind
from cps.network.mask_scores import move_scores
from cps.runtime.devices import full_precision
from cps.training import checkpoint
from cps.training.cuda.captured_step import CapturedStep
from cps.training.cuda.device_batches import EpochPlan
from cps.training.trainer import Trainer
from samples import ACCELERATOR, conv_net, make_task

LONGER = cps.Training(20, cps.Adam(1e-2), cps.Cosine(), batch_size=16)
ALL = cps.NNrelief(alpha=1.0)


@pytest.fixture
def make_full(make_learner):
    """Return a function that makes a learner whose first task has taken all there is."""

    def make(backbone=None, *, is_full=True, **settings):
        learner = make_learner(backbone, pruner=ALL, train=LONGER, **settings)
        learner.learn(make_task(0, classes=6, images=96))
        assert (learner.network.free_share() < 0.05) == is_full
        return learner

    return make


def accuracy(learner, task):
    images, labels = task.test
    index = len(learner.network.subnetworks) - 1
    found = learner.predict(images, task=index).classes
    return sum(a == b for a, b in zip(found, labels, strict=True)) / len(labels)


@pytest.mark.filterwarnings("ignore::cps.CapacityWarning")
def test_choosing_among_sealed_weights_beats_using_them_all(make_full):
    """The backbone has neither biases nor norm layers: but for the head, the choice is all that can be learned."""

    def bare():
        torch.manual_seed(1)
        return nn.Sequential(nn.Flatten(), nn.Linear(72, 16, bias=False), nn.ReLU(), nn.Linear(16, 8, bias=False))

    task = make_task(50, classes=4, images=96, test=200, seed=3)
    choosing = make_full(bare())
    before = choosing.fingerprint(0)
    choosing.learn(task)
    assert choosing.fingerprint(0) == before
    assert choosing.network.density(1) < 0.9
    whole = make_full(nn.Sequential(bare(), Scale()), capacity=cps.Capacity(crowded=0.0))
    whole.learn(task)
    assert whole.network.density(1) == 1.0
    assert accuracy(choosing, task) > accuracy(whole, task) + 0.03


class Scale(nn.Module):
    """A number to learn, so that the network is never quite without."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, features):
        return self.factor * features


def test_a_full_network_without_other_parts_learns_unless_told_to_use_everything(make_full):
    def bare():
        return nn.Sequential(nn.Flatten(), nn.Linear(72, 8, bias=False), nn.ReLU())

    with pytest.warns(cps.CapacityWarning, match="learns which sealed weights to use"):
        make_full(bare()).learn(make_task(10))
    with pytest.raises(cps.CapacityError, match="no free weights"):
        make_full(bare(), capacity=cps.Capacity(crowded=0.0)).learn(make_task(10))


def test_a_network_with_room_chooses_nothing(make_learner):
    learner = make_learner(pruner=cps.Magnitude(0.5))
    learner.learn(make_task(0))
    draft = learner.network.grow([10, 11], 12, torch.Generator(), crowded=learner.capacity.crowded)
    assert draft.scores == {}
    crowded = learner.network.grow([10, 11], 12, torch.Generator(), crowded=1.0)
    assert set(crowded.scores) == set(learner.network.weights)


def half_blind():
    """Return a network with a layer whose weights are mostly out of reach: half of its inputs are always zero."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.ZeroPad1d((0, 72)), nn.Linear(144, 8), nn.ReLU(), nn.Linear(8, 16))


def test_a_full_layer_is_enough_to_choose_though_others_keep_weights_that_no_task_can_use(make_full):
    learner = make_full(half_blind(), is_full=False)
    assert learner.network.free_share() > 0.4
    assert learner.network.free()["4.weight"] == 0
    with pytest.warns(cps.CapacityWarning, match="learns which sealed weights to use"):
        learner.learn(make_task(10))
    assert learner.network.subnetworks[1].masks["4.weight"].float().mean() < 1


def test_weights_that_the_user_froze_leave_a_network_as_roomy_as_it_is(make_learner):
    backbone = conv_net()
    backbone[3].weight.requires_grad_(False)
    learner = make_learner(backbone, pruner=cps.Magnitude(0.5))
    learner.learn(make_task(0))
    assert learner.network.free_share() < 0.2
    assert learner.network.grow([10, 11], 12, torch.Generator(), crowded=0.05).scores == {}


def stop_learning(learner, task, path, *, after):
    """Interrupt the dense training of a task after some epochs."""

    def stop(at):
        if (at.phase, at.epoch) == (0, after):
            raise KeyboardInterrupt

    learner.watch = stop
    with pytest.raises(KeyboardInterrupt):
        learner.learn(task, checkpoint=path)
    learner.watch = None


@pytest.mark.filterwarnings("ignore::cps.CapacityWarning")
def test_an_interrupted_choice_goes_on_as_if_it_had_never_stopped(make_full, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "BUSY_SHARE", math.inf)
    whole = make_full()
    whole.learn(make_task(10))
    stopped = make_full()
    stop_learning(stopped, make_task(10), tmp_path / "c", after=7)
    stopped.learn(make_task(10), checkpoint=tmp_path / "c")
    assert stopped.fingerprint(1) == whole.fingerprint(1)
    assert 0 < whole.network.density(1) < 1


@pytest.mark.filterwarnings("ignore::cps.CapacityWarning")
@pytest.mark.parametrize("began_choosing", [True, False])
def test_a_checkpoint_goes_on_as_it_began_though_another_version_would_begin_otherwise(
    make_full, tmp_path, monkeypatch, began_choosing
):
    monkeypatch.setattr(checkpoint, "BUSY_SHARE", math.inf)
    monkeypatch.setattr("cps.network.shared.is_crowded", lambda *_: began_choosing)
    whole, stopped = make_full(), make_full()
    whole.learn(make_task(10))
    stop_learning(stopped, make_task(10), tmp_path / "c", after=2)
    monkeypatch.setattr("cps.network.shared.is_crowded", lambda *_: not began_choosing)
    stopped.learn(make_task(10), checkpoint=tmp_path / "c")
    assert stopped.fingerprint(1) == whole.fingerprint(1)


def test_a_score_moves_down_the_gradient_of_its_connection():
    """Checked against a switch between 0 and 1 that is a factor of each kernel, differentiated by autograd."""
    torch.manual_seed(0)
    layer, images = nn.Conv2d(3, 4, 3, bias=False), torch.randn(5, 3, 6, 6)
    sealed = layer.weight.detach().clone()
    switch = (torch.rand(4, 3, 1, 1) < 0.7).float().requires_grad_()
    nn.functional.conv2d(images, sealed * switch).square().sum().backward()
    with torch.no_grad():
        layer.weight.mul_(switch)
    layer(images).square().sum().backward()
    scores, usable = torch.ones(4, 3, 1, 1), torch.ones(4, 3, 1, 1, dtype=torch.bool)
    usable[0, 0] = False
    move_scores(scores, layer.weight.grad, sealed, usable, 0.5)
    gradient = switch.grad * usable
    expected = 1 - 0.5 * gradient / (gradient.square().sum() / 11).sqrt()
    torch.testing.assert_close(scores, expected)
    assert scores[0, 0] == 1


@full_precision()
def test_an_engine_moves_scores_as_plain_steps_do():
    torch.manual_seed(0)
    device, optimizer = torch.device(ACCELERATOR), cps.Adam(1e-2)
    images, labels = torch.randn(16, 2, 6, 6, device=device), torch.arange(16, device=device) % 2
    backbone, head = conv_net().to(device), nn.Linear(12, 2).to(device)
    initial = copy.deepcopy(backbone.state_dict())

    def guard():
        draws = torch.Generator().manual_seed(1)
        kept = {}
        for name in ("0.weight", "3.weight"):
            shape = (*initial[name].shape[:2], 1, 1)
            taken, off = ((torch.rand(shape, generator=draws) < share).to(device) for share in (0.9, 0.1))
            kept[name] = Kept(taken, initial[name].clone(), off, torch.ones(shape, device=device))
        return kept

    training = cps.Training(1, optimizer, batch_size=16)
    model = Classifier(backbone, copy.deepcopy(head))
    names = ["0.weight", "3.weight"]
    engine = CapturedStep(model, images, training, BatchTransform(), is_bf16=False, is_long=False, choosing=names)
    ours = guard()
    backbone.load_state_dict(initial)
    engine.begin(model, ours, None)
    factors = [1.0, 1.0, 0.5, 0.5, 0.25]
    plan = EpochPlan([torch.arange(16)] * 5, torch.zeros(80, 0), factors, [1.0] * 5, pace=0.8)
    engine.run(TensorExamples(images.repeat(5, 1, 1, 1), labels.repeat(5)), plan)
    engine.settle()
    found = {name: value.clone() for name, value in backbone.state_dict().items()}

    backbone.load_state_dict(initial)
    plain, theirs = Classifier(backbone, copy.deepcopy(head)).train(), guard()
    made, protect = optimizer(plain.parameters()), bind(theirs, dict(backbone.named_parameters()))
    for factor in factors:
        made.param_groups[0]["lr"] = optimizer.lr * factor
        nn.functional.cross_entropy(plain(images), labels).backward()
        made.step()
        protect(0.8 * factor)
        made.zero_grad()
    for name in names:
        torch.testing.assert_close(ours[name].scores, theirs[name].scores, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(found[name], backbone.state_dict()[name], rtol=1e-3, atol=1e-3)
        assert (theirs[name].scores <= 0).any()


def test_the_papers_recipes_use_all_sealed_weights():
    from cps.experiments.recipes import RECIPES

    capacities = {name: make().capacity for name, make in RECIPES.items()}
    of_the_paper = [name for name in capacities if name != "digits" and not name.endswith("-single")]
    assert len(of_the_paper) == 11
    assert {capacities[name].crowded for name in of_the_paper} == {0.0}
    assert {capacity.budget for name, capacity in capacities.items() if name.endswith("-single")} == {0.01}


def test_a_task_takes_no_more_of_a_layer_than_its_budget(make_learner):
    learner = make_learner(pruner=ALL, capacity=cps.Capacity(budget=0.125))  # each of two classes an eighth
    for index in range(3):
        before = {name: mask.clone() for name, mask in learner.network.taken.items()}
        learner.learn(make_task(10 * index))
        for name, mask in learner.network.taken.items():
            assert int((mask & ~before[name]).sum()) == int(0.25 * mask.numel())
    assert learner.network.free_share() == pytest.approx(0.25)


def test_a_budget_is_reached_little_by_little(make_learner):
    seen = []

    def watching(backbone, masks, batches):
        seen.append(sum(int(mask.sum()) for mask in masks.values()))
        return masks

    learner = make_learner(pruner=watching, rounds=3, capacity=cps.Capacity(budget=0.005))
    learner.learn(make_task())
    seen.append(sum(int(mask.sum()) for mask in learner.network.taken.values()))
    sizes = [mask.numel() for mask in learner.network.taken.values()]
    assert seen == [sum(max(1, int(0.01 ** (done / 3) * size)) for size in sizes) for done in range(4)]


def test_within_a_budget_the_strongest_new_connections_stay_and_sealed_ones_are_free_of_charge():
    weight = torch.tensor([[5.0, -4.0, 1.0, 3.0], [2.0, 6.0, 0.5, 7.0]])
    taken = torch.tensor([[True, False, False, False], [False, False, False, True]])
    mask = torch.tensor([[True, True, True, True], [True, True, True, False]])
    kept = cps.Capacity(budget=0.05).within({"a": mask}, {"a": taken}, {"a": weight}, 5)["a"]
    assert kept.tolist() == [[True, True, False, False], [False, True, False, False]]
    assert cps.Capacity().within({"a": mask}, {"a": taken}, {"a": weight}, 5)["a"] is mask


@pytest.mark.parametrize("wrong", [{"crowded": 1.5}, {"crowded": -0.1}, {"budget": 0.0}, {"budget": 2.0}])
def test_shares_that_are_none_are_refused(wrong):
    with pytest.raises(ValueError, match="must be in"):
        cps.Capacity(**wrong)


def test_a_gradient_that_overflows_moves_no_score():
    """In half precision the optimizer skips such a step, so the scores must too."""
    sealed, usable = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bool)
    for bad in (torch.inf, torch.nan):
        scores, gradient = torch.ones(2, 2), torch.ones(2, 2)
        gradient[0, 0] = bad
        move_scores(scores, gradient, sealed, usable, 0.5)
        assert torch.equal(scores, torch.ones(2, 2))
    move_scores(scores, torch.ones(2, 2), sealed, usable, 0.5)  # the negative control
    assert torch.equal(scores, torch.full((2, 2), 0.5))


def test_scores_move_in_dense_training_alone(make_full, monkeypatch):
    """What is retrained after pruning is what will be sealed."""
    reaches = []
    real = Trainer.fit
    monkeypatch.setattr(
        Trainer, "fit", lambda *args, **settings: reaches.append(settings["reach"]) or real(*args, **settings)
    )
    learner = make_full()
    learner.learn(make_task(10))
    assert [reach > 0 for reach in reaches] == [True, False, True, False]
