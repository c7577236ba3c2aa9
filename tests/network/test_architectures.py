"""Backbones by name: builtin, of torchvision, of timm. Nothing else that a file names is built."""

import sys

import pytest
import torch

import cps
from cps.storage.settings_codec import decode, encode


@pytest.mark.parametrize(
    ("name", "features"), [("small", 64), ("efficientnet-lite0", 1280), ("torchvision:resnet18", 512)]
)
def test_backbones_are_built_without_their_head_and_the_same_for_a_seed(name, features):
    architecture = cps.Architecture(name)
    module, same = architecture.make(3).eval(), architecture.make(3)
    assert module(torch.zeros(1, 3, 64, 64)).shape == (1, features)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), same.parameters(), strict=True))


def test_backbones_of_timm_are_built_without_their_head():
    pytest.importorskip("timm")
    module = cps.Architecture("timm:resnet10t", channels=2).make(0).eval()
    assert module(torch.zeros(1, 2, 64, 64)).shape == (1, 512)


def test_an_architecture_with_its_weights_is_a_setting():
    architecture = cps.Architecture("torchvision:resnet18", weights="file.safetensors, digest 0123")
    assert decode(encode(architecture)) == architecture


@pytest.mark.parametrize("name", ["os.system", "torchvision:../x", "timm:a b", "file:resnet18", "", 3, "timm:"])
def test_other_names_are_refused(name):
    with pytest.raises((ValueError, TypeError)):
        cps.Architecture(name)


def test_unknown_names_raise_with_the_nearest_ones():
    with pytest.raises(ValueError, match=r"unknown backbone 'resnet18-thirt' \(did you mean resnet18-third or"):
        cps.Architecture("resnet18-thirt")
    with pytest.raises(ValueError, match=r"torchvision [\d.+a-z]+ has no network 'resnet19' \(did you mean resnet1"):
        cps.Architecture("torchvision:resnet19").make(0)
    pytest.importorskip("timm")
    with pytest.raises(ValueError, match=r"timm [\d.a-z]+ has no network 'resnet10x' \(did you mean resnet1"):
        cps.Architecture("timm:resnet10x").make(0)


def test_networks_that_do_not_end_in_a_linear_head_are_refused():
    with pytest.raises(ValueError, match="does not end in a linear head"):
        cps.Architecture("torchvision:squeezenet1_0").make(0)


def test_without_timm_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError, match=r"needs timm; install it with: pip install .*\[pretrained\]"):
        cps.Architecture("timm:resnet10t").make(0)


def test_a_model_of_a_network_that_the_installed_library_lacks_raises_and_stays(tmp_path, make_learner, monkeypatch):
    """As if the model had been written with a version of the library that has a network more."""
    pytest.importorskip("timm")
    learner = make_learner(cps.Architecture("small"))
    learner.architecture = cps.Architecture("timm:resnet_of_tomorrow")
    learner.learn(cps.Task([0, 1], train=(torch.rand(8, 3, 8, 8), [0, 1] * 4)))
    learner.save(tmp_path / "model.cps")
    before = (tmp_path / "model.cps").read_bytes()
    with pytest.raises(ValueError, match="has no network 'resnet_of_tomorrow'"):
        cps.load(tmp_path / "model.cps")
    assert (tmp_path / "model.cps").read_bytes() == before
