"""One network for all tasks, with any kind of backbone."""

import pytest
import torch
from torch import nn

import cps
from cps.network.masks import single_weights
from cps.network.model_file import fill_network, read_model, write_model
from cps.network.shared import SharedNetwork
from cps.runtime.devices import full_precision
from samples import ROUNDING, conv_net, make_task, use_all_compact
from zoo import BACKBONE_NAMES, BACKBONES


@pytest.mark.filterwarnings("ignore:.*layers without masks")
@pytest.mark.parametrize("name", BACKBONE_NAMES)
def test_every_kind_of_backbone_learns_prunes_and_never_forgets(make_learner, tmp_path, name):
    torch.manual_seed(0)
    backbone = BACKBONES[name]()
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    quick = cps.Training(1, cps.Adam(1e-3), batch_size=16)
    learner = make_learner(backbone, train=quick, retrain=quick)
    tasks = [make_task(10 * index, shape=(2, 8, 8)) for index in range(2)]
    first = learner.learn(tasks[0])
    assert any(not mask.all() for mask in first.masks.values())
    fingerprint = learner.fingerprint(0)
    learner.learn(tasks[1])
    assert learner.fingerprint(0) == fingerprint
    learner.save(tmp_path / "model.cps")
    torch.manual_seed(1)
    loaded = cps.load(tmp_path / "model.cps", BACKBONES[name](), fabric=learner.fabric)
    assert loaded.fingerprint(0) == fingerprint
    assert loaded.predict(tasks[1].test[0]).classes == learner.predict(tasks[1].test[0]).classes
    assert all(torch.equal(value, before[key]) for key, value in backbone.state_dict().items())


def test_a_layer_that_is_called_twice_is_learned(make_learner):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.layer = nn.Linear(72, 16), nn.Linear(16, 16)

        def forward(self, images):
            return self.layer(torch.relu(self.layer(self.stem(images.flatten(1)))))

    learner = make_learner(Twice())
    learner.learn(make_task(0))
    before = learner.fingerprint(0)
    learner.learn(make_task(10))
    assert learner.fingerprint(0) == before


def test_weights_that_the_user_froze_do_not_change(make_learner):
    backbone = conv_net()
    backbone[0].weight.requires_grad_(False)
    backbone[1].bias.requires_grad_(False)
    learner = make_learner(backbone)
    subnetwork = learner.learn(make_task(0))
    assert torch.equal(learner.network.weights["0.weight"].cpu(), backbone[0].weight)
    assert torch.equal(subnetwork.private["1.bias"].cpu(), backbone[1].bias)
    assert not torch.equal(subnetwork.private["1.weight"].cpu(), backbone[1].weight)


def test_tasks_of_a_wholly_frozen_backbone_learn_their_heads(make_learner):
    backbone = conv_net().requires_grad_(False)
    learner = make_learner(backbone, rounds=0)
    learner.learn(make_task(0))
    learner.learn(make_task(10))
    assert len(learner.network.subnetworks) == 2


def test_a_float64_backbone_is_learned(make_learner):
    learner = make_learner(conv_net().double(), fabric=None)
    learner.learn(make_task(0))
    before = learner.fingerprint(0)
    learner.learn(make_task(10))
    assert learner.fingerprint(0) == before
    assert next(iter(learner.network.weights.values())).dtype == torch.float64


class InPlace(nn.Module):
    """Works in place on its input."""

    def __init__(self, is_in_place):
        super().__init__()
        self.layer, self.is_in_place = nn.Conv2d(2, 8, 3), is_in_place

    def forward(self, images):
        images = images.sub_(0.5).mul_(4) if self.is_in_place else (images - 0.5) * 4
        return self.layer(images).relu().mean(dim=(2, 3))


@pytest.mark.parametrize("rotations", [cps.Upright(flips=True), cps.Rotations()], ids=["flips", "rotations"])
def test_a_backbone_that_works_in_place_does_not_change_the_next_view(make_learner, rotations):
    task, logits = make_task(0), []
    for is_in_place in (True, False):
        torch.manual_seed(0)
        learner = make_learner(InPlace(is_in_place), rotations=rotations)
        learner.learn(task)
        images = task.test[0].to(learner.network.device)
        before = images.clone()
        logits.append((learner.evidence(images)[0].logits, learner.extract(0)(images)))
        assert torch.equal(images, before)
    for in_place, plain in zip(*logits, strict=True):
        torch.testing.assert_close(in_place, plain, **ROUNDING)


class Transposed:
    """A pruner that keeps every connection and returns masks in column-major layout."""

    def __call__(self, backbone, masks, batches):
        return {name: mask.transpose(0, 1).contiguous().transpose(0, 1) for name, mask in masks.items()}


def test_the_memory_layout_of_masks_does_not_change_the_layout_of_weights(make_learner, tmp_path):
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(72, 16), nn.ReLU(), nn.Linear(16, 8))
    learner = make_learner(backbone, pruner=Transposed())
    learner.learn(make_task(0))
    learner.save(tmp_path / "model.cps")
    loaded = cps.load(tmp_path / "model.cps", backbone, pruner=Transposed(), fabric=learner.fabric)
    assert not learner.network.subnetworks[0].masks["1.weight"].is_contiguous()
    strides = [{name: v.stride() for name, v in each.network.tensors_of(0).items()} for each in (learner, loaded)]
    assert strides[0] == strides[1]
    assert loaded.fingerprint(0) == learner.fingerprint(0)


def test_an_extracted_subnetwork_scales_uint8_images_as_the_learner_does(make_learner):
    images, labels = make_task(0).train
    pixels = (images.clamp(-2, 2) * 60 + 128).to(torch.uint8)
    learner = make_learner(normalize=cps.Normalize([0.5, 0.4], [0.2, 0.3]))
    learner.learn(cps.Task([0, 1], train=(pixels, labels)))
    expected = learner.evidence(pixels)[0].logits
    with full_precision():
        torch.testing.assert_close(learner.extract(0)(pixels.to(expected.device)), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("number", "sizes"), [(1, [8]), (12, [96]), (70, [256, 256, 48])])
def test_all_views_of_few_images_run_in_one_batch_and_many_in_several(make_learner, monkeypatch, number, sizes):
    learner = make_learner(rotations=cps.Rotations(flips=True))
    learner.learn(make_task(0))
    images, batches = torch.randn(number, 2, 6, 6, generator=torch.Generator().manual_seed(0)), []
    learner.network.backbone.register_forward_hook(lambda _module, inputs, _features: batches.append(len(inputs[0])))
    with full_precision():
        together = learner.network.full_outputs([images], 0)
        assert batches == sizes
        monkeypatch.setattr("cps.network.shared.MAX_BATCH", 1)
        one_by_one = learner.network.full_outputs([images], 0)
    assert batches[len(sizes) :] == [8] * number
    torch.testing.assert_close(together.logits, one_by_one.logits, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(together.features, one_by_one.features, rtol=1e-3, atol=1e-3)


def test_tasks_with_different_views_run_together(make_learner):
    learner = make_learner(rotations=cps.Upright(flips=True))
    for first, rotations in ((0, cps.Upright(flips=True)), (10, cps.Rotations()), (20, cps.Upright())):
        learner.configure(rotations=rotations)
        learner.learn(make_task(first))
    use_all_compact(learner)
    images = make_task(0).test[0]
    with full_precision():
        for task, outputs in enumerate(learner.network.outputs([images], range(3))):
            expected = learner.network.full_outputs([images], task).logits
            torch.testing.assert_close(outputs.logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("number", [1, 5, 33])
def test_a_later_task_with_other_views_does_not_change_earlier_outputs(make_learner, number):
    learner, images = make_learner(), torch.randn(number, 2, 6, 6, generator=torch.Generator().manual_seed(0))

    def learn(first, rotations):
        learner.configure(rotations=rotations)
        learner.learn(make_task(first))
        use_all_compact(learner)

    learn(0, cps.Upright())
    before = learner.evidence(images)[0]
    for first, rotations in ((10, cps.Upright()), (20, cps.Rotations(flips=True))):
        learn(first, rotations)
        assert all(map(torch.equal, learner.evidence(images)[:][0], before))


def test_masks_can_have_an_entry_for_every_single_weight(tmp_path):
    """Half of the weights inside each kernel belong to the first task; the others stay free, also in a file."""

    def new_network():
        torch.manual_seed(0)
        return SharedNetwork(conv_net(), shape=single_weights)

    network, draws = new_network(), torch.Generator().manual_seed(0)
    network.set_input((2, 6, 6), (-1.0, 1.0))
    for task in range(2):
        draft = network.new_draft([2 * task, 2 * task + 1], 12, draws)
        guard = draft.guard()["3.weight"]
        draft.prune(
            {name: torch.arange(mask.numel()).reshape(mask.shape) % 3 == task for name, mask in draft.masks.items()}
        )
        assert int(guard.taken.sum()) == (0, 288)[task]  # of 12 x 8 x 3 x 3
        network.seal(draft)
    assert network.density(0) == pytest.approx(1 / 3, abs=1e-3)
    assert network.free_by_layer()["3.weight"] == pytest.approx(1 / 3)
    write_model(tmp_path / "model", network, {}, None)
    read = new_network()
    fill_network(read, tmp_path / "model", *read_model(tmp_path / "model"))
    assert [read.fingerprint(task) for task in range(2)] == [network.fingerprint(task) for task in range(2)]
    images = torch.randn(3, 2, 6, 6, generator=draws)
    for task in range(2):
        compact, full = network.extract(task)(images), network.full_outputs([images], task).logits
        torch.testing.assert_close(compact, full, rtol=1e-3, atol=1e-3)
