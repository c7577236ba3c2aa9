"""Subnetworks behind a frozen trunk: the first layers of a pretrained backbone run once and never change."""

import pytest
import torch

import cps
from cps.closed_form.spaces import root_normalize
from cps.storage import container
from cps.training.cached_maps import RandomCopy, cache_maps
from samples import ROUNDING, conv_net, make_task

FIRSTS = (0, 10, 20)
IMAGES = torch.cat([make_task(first).test[0] for first in FIRSTS])
CLASSES = [label for first in FIRSTS for label in make_task(first).test[1]]
CLOSE = ROUNDING or {"rtol": 1e-4, "atol": 1e-4}
TRAINING = cps.Training(3, cps.SGD(0.02), batch_size=8)
SETTINGS = {
    "trunk": "2", "map_copies": 3, "augment": cps.PadCrop(1), "rounds": 1, "train": TRAINING, "retrain": TRAINING,
    "selectors": (cps.Fusion(cascade=cps.Cascade(size=8)),),
}  # fmt: skip


def new_learner(fabric, **settings):
    torch.manual_seed(0)
    return cps.Learner(conv_net(), fabric=fabric, **{**SETTINGS, **settings})


@pytest.fixture(scope="module")
def learner(fabric):
    """Return a learner of a trained task, a frozen one and another trained one; tests must not change it."""
    learner = new_learner(fabric)
    learner.learn(make_task(0))
    learner.learn_frozen(make_task(10))
    learner.learn(make_task(20))
    return learner


def fingerprints(learner):
    return [learner.fingerprint(task) for task in range(len(learner.classes))]


def test_tasks_are_learned_in_free_weights_behind_the_trunk(learner):
    predicted = learner.predict(IMAGES).classes
    assert sum(name == label for name, label in zip(predicted, CLASSES, strict=True)) / len(CLASSES) > 0.8
    assert set(learner.network.weights) == {"3.weight"}
    assert learner.network.free_share() < 1


def test_a_subnetwork_reads_its_own_features_and_those_of_the_backbone_as_it_came(learner):
    network, subnetwork = learner.network, learner.network.subnetworks[2]
    torch.manual_seed(0)
    backbone = conv_net().eval().to(network.device)
    maps = backbone[:3](IMAGES.to(network.device))
    came = root_normalize(backbone[3:](maps))
    tail = torch.func.functional_call(network.backbone, network.tensors_of(2), (maps,))
    logits = root_normalize(tail) @ subnetwork.head["weight"].T + subnetwork.head["bias"]
    logits += came @ subnetwork.pretrained_head["weight"].T
    torch.testing.assert_close(network.full_outputs([IMAGES], 2).logits, logits, **CLOSE)
    torch.testing.assert_close(learner.evidence(IMAGES)[2].logits, logits, **CLOSE)


def test_old_answers_and_the_trunk_never_change(fabric):
    learner = new_learner(fabric)
    trunk = container.digest(learner.network.trunk_tensors())
    seen, prints = [], []
    for first in FIRSTS:
        learner.learn(make_task(first))
        task = len(seen)
        seen.append(learner.evidence(IMAGES)[task].logits)
        prints.append(learner.fingerprint(task))
        assert all(torch.equal(learner.evidence(IMAGES)[each].logits, seen[each]) for each in range(task + 1))
    assert fingerprints(learner) == prints
    assert container.digest(learner.network.trunk_tensors()) == trunk


def test_the_trunk_runs_once_for_an_image_whatever_the_number_of_tasks(learner):
    images = []
    hook = learner.network.trunk.register_forward_hook(lambda _module, inputs, _outputs: images.append(len(inputs[0])))
    learner.predict(IMAGES)
    learner.predict(IMAGES, task=2)
    hook.remove()
    assert sum(images) == 2 * len(IMAGES)


def test_a_model_file_holds_the_trunk_and_opens_to_the_same_bits(learner, fabric, tmp_path):
    learner.save(tmp_path / "model.cps")
    torch.manual_seed(1)
    again = cps.load(tmp_path / "model.cps", conv_net(), fabric=fabric)  # other weights
    assert fingerprints(again) == fingerprints(learner)
    assert torch.equal(again.predict(IMAGES).confidence, learner.predict(IMAGES).confidence)


def test_a_file_with_a_changed_trunk_is_refused(learner, fabric, tmp_path):
    learner.save(tmp_path / "model.cps")
    header, tensors = container.read(tmp_path / "model.cps", "model")
    container.write(tmp_path / "same.cps", "model", header, tensors)
    cps.load(tmp_path / "same.cps", conv_net(), fabric=fabric)  # negative control
    tensors["trunk/0.weight"] = tensors["trunk/0.weight"] + 1e-3
    container.write(tmp_path / "changed.cps", "model", header, tensors)
    with pytest.raises(cps.FileError, match="has changed since it was sealed"):
        cps.load(tmp_path / "changed.cps", conv_net(), fabric=fabric)
    header["settings"]["trunk"] = "layer9"
    container.write(tmp_path / "other.cps", "model", header, tensors)
    with pytest.raises(ValueError, match="cannot be split behind 'layer9'"):
        cps.load(tmp_path / "other.cps", conv_net(), fabric=fabric)


def test_a_forgotten_task_leaves_the_others_to_the_bit_and_free_weights_as_they_came(learner, fabric, tmp_path):
    learner.save(tmp_path / "model.cps")
    changed = cps.load(tmp_path / "model.cps", conv_net(), fabric=fabric)
    changed.forget(0)
    assert fingerprints(changed) == fingerprints(learner)[1:]
    free = ~changed.network.taken["3.weight"].expand_as(changed.network.weights["3.weight"])
    assert torch.equal(changed.network.weights["3.weight"][free], changed.network.pretrained["3.weight"][free])


def test_an_interrupted_task_resumes_to_the_bit(fabric, tmp_path):
    whole, stopped, resumed = (new_learner(fabric) for _ in range(3))
    whole.learn(make_task(0))

    def stop(progress):
        if progress.done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped.learn(make_task(0), checkpoint=tmp_path / "checkpoint", on_epoch=stop)
    resumed.learn(make_task(0), checkpoint=tmp_path / "checkpoint")
    assert fingerprints(resumed) == fingerprints(whole)


def test_an_extracted_subnetwork_and_an_export_of_all_tasks_give_the_same_answers(learner):
    module = learner.extract(2).to("cpu")
    expected = learner.evidence(IMAGES)[2].logits.cpu()
    torch.testing.assert_close(module(IMAGES), expected, **CLOSE)
    every = cps.AllTasksModule(learner.network, learner.config.selectors[0])
    found = every(IMAGES.to(learner.network.device))
    assert [every.classes[index] for index in found.class_index.tolist()] == learner.predict(IMAGES).classes


def test_the_first_copy_of_cached_maps_is_the_image_and_the_others_are_augmented(learner):
    images, labels = make_task(0).train
    examples = cps.data.examples.as_examples((images, labels), lambda names: torch.tensor(names))
    draw, progress = torch.Generator().manual_seed(0), []
    maps = cache_maps(
        learner.network, examples, cps.PadCrop(1), 3, draw, learner.fabric,
        on_progress=lambda done, total: progress.append((done, total)),
    )  # fmt: skip
    plain = learner.network.maps(images).values
    assert torch.equal(maps.values[:, 0], plain)
    assert torch.equal(maps.plain.images, plain)
    assert not torch.equal(maps.values[:, 1], plain)
    assert progress == [(72, 72)]
    without = cache_maps(learner.network, examples, None, 3, draw, learner.fabric)
    assert without.values.shape[1] == 1


def test_each_copy_is_chosen_by_its_own_number():
    copies = torch.arange(6.0).reshape(2, 3, 1)  # two images with three copies each
    chosen = RandomCopy()(copies, torch.tensor([[0.0], [0.999]]))
    assert chosen.flatten().tolist() == [0.0, 5.0]


def test_too_many_maps_are_refused_before_training(learner, fabric, monkeypatch):
    monkeypatch.setattr("cps.training.cached_maps.MOST_BYTES", 1000)
    with pytest.raises(ValueError, match=r"the outputs of the trunk for 24 images take .* GiB, more than"):
        new_learner(fabric).learn(make_task(0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trunk": 3}, "trunk must be the name of a layer"),
        ({"trunk": "nothing"}, "cannot be split behind 'nothing'"),
        ({"rotations": cps.Rotations()}, r"rotations must be cps.Upright\(\) with a trunk"),
        ({"selectors": (cps.Fusion(cps.SharedSpace(cps.RandomReLU())),)}, "must be cps.Pretrained"),
        ({"selectors": (cps.SharedSpace(flips=True),)}, "flips=False with a trunk"),
        ({"map_copies": 0}, "map_copies must be an integer, 1 or more"),
    ],
)
def test_settings_that_do_not_go_with_a_trunk_are_refused(fabric, settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        new_learner(fabric, **settings)


def test_the_trunk_cannot_change_later(learner):
    learner.configure(trunk="2")
    with pytest.raises(ValueError, match="trunk cannot change"):
        learner.configure(trunk="0")


def odd_or_even_task(*, wrong):
    """Return a task of two classes of six patterns each, which a linear function of fixed features hardly tells apart.

    If `wrong`, the held-out images have the wrong labels, so that nothing that was learned helps.
    """
    patterns = make_task(0, classes=12, images=96, test=96)
    labels = [[label % 2 for label in part[1]] for part in (patterns.train, patterns.test)]
    held_out = [1 - label for label in labels[1]] if wrong else labels[1]
    return cps.Task([0, 1], train=(patterns.train[0], labels[0]), val=(patterns.test[0], held_out))


def test_held_out_images_decide_whether_training_has_paid(fabric, caplog):
    training = cps.Training(20, cps.SGD(0.01), cps.Cosine(), 8, cps.SmoothedCrossEntropy())
    wrong, paid, frozen = (new_learner(fabric, train=training, retrain=training) for _ in range(3))
    with caplog.at_level("INFO", "cps"):
        wrong.learn(odd_or_even_task(wrong=True))
        paid.learn(odd_or_even_task(wrong=False))
    frozen.learn_frozen(odd_or_even_task(wrong=True))
    assert [each.is_frozen for each in wrong.network.subnetworks + paid.network.subnetworks] == [True, False]
    assert caplog.text.count("training has not paid") == 1
    assert wrong.network.free_share() == 1
    torch.testing.assert_close(wrong.evidence(IMAGES)[0].logits, frozen.evidence(IMAGES)[0].logits, **CLOSE)
    images, labels = odd_or_even_task(wrong=False).val
    trained, closed = (
        sum(a == b for a, b in zip(learner.predict(images, task=0).classes, labels, strict=True)) / len(labels)
        for learner in (paid, frozen)
    )
    assert trained > closed + 0.05


def test_a_forgotten_class_is_cut_off_both_heads_and_known_classes_grow(fabric, tmp_path):
    learner = new_learner(fabric)
    learner.learn(make_task(0, classes=3, images=30))
    learner.learn(make_task(10))
    logits, other = learner.evidence(IMAGES)[0].logits, learner.fingerprint(1)
    learner.forget_class(1)
    learner.add(make_task(0, classes=1, seed=1))
    learner.learn(make_task(0, classes=3, seed=2), new_versions=True)
    assert learner.classes == [(0, 2), (10, 11), (0, 1, 2)]
    torch.testing.assert_close(learner.evidence(IMAGES)[0].logits, logits[:, [0, 2]], **CLOSE)
    assert learner.fingerprint(1) == other
    learner.save(tmp_path / "model.cps")
    loaded = cps.load(tmp_path / "model.cps", conv_net(), fabric=fabric)
    assert loaded.predict(IMAGES).classes == learner.predict(IMAGES).classes
