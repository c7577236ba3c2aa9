"""A frozen trunk for methods with one head: the same training as on the whole backbone with a frozen trunk."""

import pytest
import torch
from method_samples import MEMORY, QUICK

import cps
from cps.data.batch_transform import BatchTransform
from cps.data.examples import TensorExamples
from cps.data.normalize import Prepare
from cps.methods.blocks import trunk_maps
from cps.methods.blocks.trunk_maps import FirstCopy, TrunkMaps
from cps.methods.finetuning import Finetuning
from cps.methods.replay.experience_replay import ExperienceReplay
from cps.methods.replay.icarl import ICaRL
from cps.network.trunk import split_backbone
from cps.training.cached_maps import RandomCopy
from samples import conv_net, make_task

TRUNK = "2"  # the first convolution of conv_net with its norm
IMAGES, LABELS = make_task(0).train


def maps_of(augment=None, copies=3, seed=0):
    torch.manual_seed(0)
    trunk, _ = split_backbone(conv_net(), TRUNK)
    return TrunkMaps(trunk, Prepare(), augment, copies, seed, torch.device("cpu"))


def behind_trunk(kind, fabric, **settings):
    torch.manual_seed(0)
    return kind(conv_net(), **{"trunk": TRUNK, "map_copies": 3, "train": QUICK, "fabric": fabric, **settings})


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ExperienceReplay, ICaRL])
def test_a_method_behind_a_trunk_keeps_the_contract_of_methods(kind, fabric):
    settings = {"trunk": "layers.2", "map_copies": 2, "augment": cps.PadCrop(1), "memory": MEMORY}
    cps.check_method(lambda backbone: kind(backbone, train=QUICK, fabric=fabric, **settings))


def test_the_maps_of_an_image_are_the_outputs_of_the_first_layers(fabric):
    torch.manual_seed(0)
    expected = conv_net().eval()[:3](IMAGES)
    maps = maps_of()
    torch.testing.assert_close(maps(IMAGES), expected)
    examples = maps.examples(TensorExamples(IMAGES, torch.tensor(LABELS)))
    ((found, labels),) = examples.batches([torch.tensor([5, 0])])
    torch.testing.assert_close(found, expected[[5, 0]][:, None])
    assert labels.tolist() == [LABELS[5], LABELS[0]]


def test_copies_depend_on_the_seed_and_the_image_and_not_on_when_they_are_computed():
    whole = TensorExamples(IMAGES, torch.tensor(LABELS))
    first, again, other = maps_of(cps.PadCrop(2)), maps_of(cps.PadCrop(2)), maps_of(cps.PadCrop(2), seed=1)
    ((expected, _),) = first.examples(whole).batches([torch.arange(24)])
    assert expected.shape[:2] == (24, 3)
    again.examples(TensorExamples(IMAGES[[7, 3]], torch.tensor([0, 1])))
    ((found, _),) = again.examples(whole).batches([torch.arange(24)])
    assert torch.equal(found, expected)
    ((drawn, _),) = other.examples(whole).batches([torch.arange(24)])
    assert torch.equal(drawn[:, 0], expected[:, 0])
    assert not torch.equal(drawn[:, 1:], expected[:, 1:])


def test_known_images_do_not_pass_the_trunk_again_until_they_are_dropped():
    maps, seen = maps_of(cps.PadCrop(1)), []
    maps.trunk.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    progress = []
    maps.examples(TensorExamples(IMAGES, torch.tensor(LABELS)), lambda *at: progress.append(at))
    assert (sum(seen), progress) == (3 * 24, [(24, 24)])
    maps.examples(TensorExamples(IMAGES[5:9], torch.tensor(LABELS[5:9])), lambda *at: progress.append(at))
    maps.keep([IMAGES[:2], IMAGES[4:5]])
    maps.examples(TensorExamples(IMAGES[:6], torch.tensor(LABELS[:6])))
    assert (sum(seen), len(progress)) == (3 * (24 + 3), 1)


def test_the_transform_of_maps_takes_a_random_copy_where_raw_images_are_augmented():
    maps = maps_of(cps.PadCrop(1))
    assert isinstance(maps.transform(BatchTransform(maps, cps.PadCrop(1))).augment, RandomCopy)
    assert isinstance(maps.transform(BatchTransform(maps)).augment, FirstCopy)
    pixels, labels = maps.transform(BatchTransform(maps))(
        torch.arange(12.0).reshape(2, 3, 2), torch.tensor([4, 5]), torch.zeros(2, 0)
    )
    assert pixels.tolist() == [[0.0, 1.0], [6.0, 7.0]]
    assert labels.tolist() == [4, 5]


def test_training_behind_a_trunk_is_training_with_a_frozen_trunk(fabric):
    """Without augmentation: the same weights, to rounding, as a network whose first layers are frozen and in eval mode."""

    class FrozenStart(torch.nn.Sequential):
        def train(self, mode=True):
            super().train(mode)
            self[0].eval()
            return self

    method = behind_trunk(Finetuning, fabric)
    torch.manual_seed(0)
    net = conv_net().eval()
    whole = Finetuning(FrozenStart(net[:3].requires_grad_(False), net[3:]), train=QUICK, fabric=fabric)
    for task in (make_task(0), make_task(10)):
        method.learn(task)
        whole.learn(task)
    trained, expected = method.model.state_dict(), whole.model.state_dict()
    assert len(trained) < len(expected)
    torch.testing.assert_close(trained["head.weight"], expected["head.weight"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        method.evidence(IMAGES)[1].logits, whole.evidence(IMAGES)[1].logits, rtol=1e-4, atol=1e-5
    )


def test_the_memory_keeps_images_and_the_trunk_counts_once(fabric):
    method = behind_trunk(ICaRL, fabric, memory=MEMORY, augment=cps.PadCrop(1))
    for first in (0, 10):
        method.learn(make_task(first))
    assert method.exemplars.images[0].shape[1:] == (2, 6, 6)
    assert method.kept()["exemplars"] == len(method.exemplars) * 2 * 6 * 6 * 4
    whole = ICaRL(conv_net(), train=QUICK, memory=MEMORY, fabric=fabric)
    for first in (0, 10):
        whole.learn(make_task(first))
    assert method.kept()["weights"] == whole.kept()["weights"]
    assert method.kept(learning=True)["teacher"] < whole.kept(learning=True)["teacher"]


def test_a_file_of_another_trunk_is_refused(fabric, tmp_path):
    method = behind_trunk(Finetuning, fabric)
    method.learn(make_task(0))
    method.save(tmp_path / "method")
    again = behind_trunk(Finetuning, fabric)
    again.load(tmp_path / "method")
    assert torch.equal(again.evidence(IMAGES)[0].logits, method.evidence(IMAGES)[0].logits)
    torch.manual_seed(1)
    other = Finetuning(conv_net(), trunk=TRUNK, map_copies=3, train=QUICK, fabric=fabric)
    with pytest.raises(ValueError, match="has another method or other settings"):
        other.load(tmp_path / "method")


def test_maps_that_take_too_much_memory_are_refused(monkeypatch):
    monkeypatch.setattr(trunk_maps, "MOST_BYTES", 10_000)
    with pytest.raises(ValueError, match="the maps of 24 images .* use fewer map_copies, or a trunk that ends later"):
        maps_of(cps.PadCrop(1)).examples(TensorExamples(IMAGES, torch.tensor(LABELS)))
