"""A state dict holds what is needed to rebuild a subnetwork."""

import json

import torch
from safetensors import safe_open
from safetensors.torch import load_file

import cps


def test_a_state_dict_holds_the_tensors_layers_and_forward_code(learner, images, tmp_path):
    path = tmp_path / "second.safetensors"
    cps.export_task(learner, 1, path)
    module = learner.extract(1)
    before = module(images)
    for parameter in module.parameters():
        parameter.data.zero_()
    assert not torch.equal(module(images), before)
    module.load_state_dict(load_file(path))
    assert torch.equal(module(images), before)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert json.loads(metadata["classes"]) == [10, 11, 12]
    layers = json.loads(metadata["layers"])
    assert "Conv2d" in layers["backbone.layers.0"]
    assert "layers_0" in metadata["forward"]
