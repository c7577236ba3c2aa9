"""Graphs are checked before they are put in place."""

import sys

import pytest
import torch
from torch import nn

from cps.export.tasks import export_task
from samples import make_task

pytestmark = pytest.mark.slow  # writing an ONNX graph takes about a second


def test_without_onnxruntime_the_graph_is_written_unchecked(learner, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert export_task(learner, 0, tmp_path / "x.onnx").difference is None
    assert (tmp_path / "x.onnx").exists()


def test_a_graph_that_differs_from_torch_is_not_written(learner, tmp_path, monkeypatch):
    (tmp_path / "x.onnx").write_text("what was there before")
    monkeypatch.setattr("cps.export.onnx.TOLERANCE", -1.0)
    with pytest.raises(RuntimeError, match="compute different outputs"):
        export_task(learner, 0, tmp_path / "x.onnx")
    assert (tmp_path / "x.onnx").read_text() == "what was there before"
    assert [path.name for path in tmp_path.iterdir()] == ["x.onnx"]


def test_a_backbone_that_fixes_the_batch_size_is_rejected(make_learner, tmp_path):
    class FixedBatch(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.first = nn.Linear(72, 8), nn.Parameter(torch.zeros(1, 72))

        def forward(self, x):
            return self.layer(x.flatten(1) + self.first.expand(len(x), -1))

    learner = make_learner(FixedBatch())
    learner.learn(make_task(0))
    with pytest.raises(RuntimeError, match=r"use x.shape\[0\] instead of len\(x\)"):
        export_task(learner, 0, tmp_path / "graph.onnx")
    assert not list(tmp_path.iterdir())
