"""Load a learner from its model file, with a backbone if the file does not name one."""

import pytest
import torch
from torch import nn

import cps
from samples import conv_net, make_task


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """Return a learner with two tasks of named classes, and its model file."""
    torch.manual_seed(0)
    training = cps.Training(1, cps.SGD(0.01), cps.Steps((1,), 0.5), batch_size=16)
    learner = cps.Learner(
        conv_net(), rounds=1, train=training, retrain=training, fabric=cps.make_fabric(accelerator="cpu"),
        normalize=cps.Normalize((0.5, 0.5), (0.2, 0.2)), augment=cps.Chain((cps.PadCrop(1), cps.Flip())),
    )  # fmt: skip
    images, labels = make_task(0).train
    learner.learn(cps.Task(["häschen", "cat\n"], train=(images, [label % 2 for label in labels])))
    learner.learn(make_task(10))
    path = tmp_path_factory.mktemp("model") / "model.cps"
    learner.save(path)
    return learner, path


def test_learning_after_loading_gives_the_same_bits_each_time(learned, tmp_path):
    _, path = learned
    first, second = (cps.load(path, conv_net(), fabric=learned[0].fabric) for _ in range(2))
    first.learn(make_task(20))
    first.save(tmp_path / "three.cps")
    second.learn(make_task(20))
    assert first.fingerprint(2) == second.fingerprint(2)


def test_a_model_of_a_builtin_backbone_loads_without_it_and_keeps_its_notes(tmp_path):
    learner = cps.Learner(cps.Builtin("small"), rounds=0, train=cps.Training(1))
    learner.learn(make_task(0, shape=(3, 6, 6)))
    learner.annotate(0, day="2026-11-15")
    learner.save(tmp_path / "model.cps")
    loaded = cps.load(tmp_path / "model.cps")
    assert loaded.fingerprint(0) == learner.fingerprint(0)
    assert loaded.network.subnetworks[0].notes == {"day": "2026-11-15"}
    assert loaded.architecture == cps.Builtin("small")
    again = cps.Learner(cps.Builtin("small"), rounds=0, train=cps.Training(1))
    torch.manual_seed(5)  # a builtin backbone depends only on the learner's seed
    again.learn(make_task(0, shape=(3, 6, 6)))
    assert again.fingerprint(0) == learner.fingerprint(0)


def test_a_model_of_a_custom_backbone_needs_that_backbone(learned):
    with pytest.raises(ValueError, match="your own backbone; pass a backbone of the same architecture"):
        cps.load(learned[1])


def test_another_backbone_raises_and_names_the_tensor_that_differs(learned):
    wider = nn.Sequential(nn.Conv2d(2, 9, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(cps.FileError, match=r"weight/0.weight' is float32 \(8, 2, 3, 3\), expected float32 \(9"):
        cps.load(learned[1], wider)


def test_a_missing_file_raises_file_not_found(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing.cps"):
        cps.load(tmp_path / "nothing.cps", conv_net())


def test_a_registered_subclass_of_a_selector_is_loaded(make_learner, tmp_path):
    @cps.setting
    class Renamed(cps.MaxOutput):
        name = "Renamed"

    learner = make_learner(selectors=[Renamed()])
    learner.learn(make_task(0))
    learner.save(tmp_path / "model.cps")
    assert cps.load(tmp_path / "model.cps", conv_net()).config.selectors == (Renamed(),)
