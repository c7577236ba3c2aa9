"""The --loader option."""

import json
import sys

import pytest
import torch

import cps
from commands import CPU, predict_json, run_cps
from cps.cli.arguments import get_loader


def test_a_loader_opens_a_model_with_a_custom_backbone(trained, tmp_path, monkeypatch):
    (tmp_path / "mynet.py").write_text(
        "import cps\n"
        "from torch import nn\n"
        "def net():\n"
        "    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())\n"
        "def load(path, **settings):\n"
        "    from helper import known\n"
        "    return cps.load(path, net(), **settings)\n"
        "def nothing(path, **settings):\n"
        "    return None\n"
        "def narrow():\n"
        "    return None\n"
        "value = 3\n"
    )
    (tmp_path / "helper.py").write_text("known = True\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    mine = get_loader("mynet:load")
    net = sys.modules["mynet"].net
    quick = cps.Training(1)
    learner = cps.Learner(net(), rounds=1, train=quick, retrain=quick)
    learner.learn(cps.Task(["bolt", "nut"], train=(torch.rand(24, 3, 8, 8), ["bolt", "nut"] * 12)))
    learner.save("own.cps")
    assert mine("own.cps").classes == learner.classes
    image = trained[0] / "inbox" / "bolt" / "0.png"
    rows = predict_json(image, "--model", "own.cps", "--loader", "mynet:load")
    assert rows[0]["class"] in ("bolt", "nut")
    rejected = run_cps("predict", image, "--model", "own.cps", *CPU, code=1).output.replace("\n", " ")
    assert "your own backbone; pass a backbone of the same architecture, in a function given with --loader" in rejected
    for odd, message in (
        ("value", "which is 3"),
        ("nothing", "must return"),
        ("narrow", "must accept a path and settings"),
    ):
        assert message in run_cps("verify", "own.cps", "--loader", f"mynet:{odd}", code=1).output.replace("\n", " ")
    checks = json.loads(run_cps("verify", "own.cps", "--loader", "mynet:load", "--json").stdout)
    assert checks[-1]["what"].startswith("outputs")
    run_cps("export", "own.cps", "--task", 1, "--to", "task.safetensors", "--loader", "mynet:load")
    run_cps("forget", "own.cps", "--task", 1, "--yes", "--loader", "mynet:load")
    assert mine("own.cps").classes == []
    (tmp_path / "broken.py").write_text("def")
    for name in ("mynet", "mynet:lost", "nowhere:load", ":", "broken:load"):
        with pytest.raises(ValueError, match="--loader must be module:function"):
            get_loader(name)
