"""A state dict holds what is needed to rebuild a subnetwork."""

import json

import torch
from safetensors import safe_open
from safetensors.torch import load_file

import cps
from samples import conv_net, make_task


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


def test_the_forward_code_behind_a_trunk_includes_the_trunk_and_the_pretrained_layers(fabric, tmp_path):
    torch.manual_seed(0)
    training = cps.Training(1, cps.SGD(0.02), batch_size=8)
    learner = cps.Learner(conv_net(), trunk="2", rounds=0, train=training, retrain=training, fabric=fabric)
    learner.learn(make_task(0))
    learner.learn_frozen(make_task(10))
    for task, parts in ((0, {"forward", "trunk forward", "pretrained forward"}), (1, {"forward", "trunk forward"})):
        path = tmp_path / f"{task}.safetensors"
        cps.export_task(learner, task, path)
        with safe_open(path, framework="pt") as file:
            codes = {name: code for name, code in file.metadata().items() if name.endswith("forward")}
        assert set(codes) == parts
        assert all(code.startswith("def forward") for code in codes.values())
