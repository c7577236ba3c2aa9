"""Load a learner from its model file, with a backbone if the file does not name one."""

import pytest
import torch
from torch import nn

import cps
from samples import conv_net, make_task


def test_learning_after_loading_gives_the_same_bits_each_time(saved, tmp_path):
    _, path = saved
    first, second = (cps.load(path, conv_net(), fabric=saved[0].fabric) for _ in range(2))
    first.learn(make_task(20))
    first.save(tmp_path / "three.cps")
    second.learn(make_task(20))
    assert first.fingerprint(2) == second.fingerprint(2)


def test_a_model_of_a_builtin_backbone_loads_without_it_and_keeps_its_notes(tmp_path):
    learner = cps.Learner(cps.Architecture("small"), rounds=0, train=cps.Training(1))
    learner.learn(make_task(0, shape=(3, 6, 6)))
    learner.annotate(0, day="2026-11-15")
    learner.save(tmp_path / "model.cps")
    loaded = cps.load(tmp_path / "model.cps")
    assert loaded.fingerprint(0) == learner.fingerprint(0)
    assert loaded.network.subnetworks[0].notes == {"day": "2026-11-15"}
    assert loaded.architecture == cps.Architecture("small")
    again = cps.Learner(cps.Architecture("small"), rounds=0, train=cps.Training(1))
    torch.manual_seed(5)  # a builtin backbone depends only on the learner's seed
    again.learn(make_task(0, shape=(3, 6, 6)))
    assert again.fingerprint(0) == learner.fingerprint(0)


def test_a_model_of_a_custom_backbone_needs_that_backbone(saved):
    with pytest.raises(ValueError, match="your own backbone; pass a backbone of the same architecture"):
        cps.load(saved[1])


def test_another_backbone_raises_and_names_the_tensor_that_differs(saved):
    wider = nn.Sequential(nn.Conv2d(2, 9, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(cps.FileError, match=r"weight/0.weight' is float32 \(8, 2, 3, 3\), expected float32 \(9"):
        cps.load(saved[1], wider)


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
