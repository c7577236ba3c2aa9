"""Exported files compute what the learner does, without cps."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from sklearn.datasets import load_digits, load_sample_image
from torch import nn

import cps
from cps.data.decode import ImageFormat
from cps.export.tasks import PREPARED, export_all, export_task

pytestmark = pytest.mark.slow  # writing an ONNX graph takes about a second


def test_the_graph_of_all_tasks_predicts_what_the_learner_predicts(learner, all_tasks_graph, run_onnx, images):
    found, metadata = run_onnx(all_tasks_graph, images)
    expected = learner.predict(images)
    names = json.loads(metadata["classes"])
    assert [names[index] for index in found["class"].tolist()] == expected.classes
    assert torch.equal(found["task"], expected.tasks)
    torch.testing.assert_close(found["confidence"], expected.confidence, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found["class_scores"], expected.scores, rtol=1e-3, atol=1e-3)
    assert len(set(expected.tasks.tolist())) > 1  # otherwise a graph that always selects one task would pass


def test_a_graph_accepts_any_batch_size(all_tasks_graph, run_onnx, images):
    for number in (1, 7):
        assert run_onnx(all_tasks_graph, images[:number])[0]["scores"].shape == (number, 3)


def test_the_metadata_describe_tasks_images_and_selector(learner, all_tasks_graph, run_onnx, images):
    metadata = run_onnx(all_tasks_graph, images)[1]
    assert json.loads(metadata["tasks"])[1] == {"task": 2, "classes": [10, 11, 12]}
    low, high = learner.network.input_range
    assert low < 0
    assert high > 1
    assert json.loads(metadata["image"]) == {
        "shape": [3, 8, 8], "layout": "channels, height, width",
        "values": f"floats as in training, about {low:g} to {high:g}",
    }  # fmt: skip
    assert metadata["selector"] == "Fusion"


def test_graphs_predict_learned_digits_as_the_learner_does(run_onnx, tmp_path):
    images, labels = load_digits(return_X_y=True)
    pixels = torch.from_numpy(images.reshape(-1, 1, 8, 8) * 255 / 16).to(torch.uint8).expand(-1, 3, -1, -1)
    training = cps.Training(4, cps.Adam(1e-2), batch_size=32)
    fabric = cps.make_fabric(accelerator="cpu")  # as onnxruntime
    learner = cps.Learner(cps.Architecture("small"), rounds=1, train=training, retrain=training, fabric=fabric)
    for names in ([0, 1, 2], [3, 4]):
        mine = np.isin(labels[:1200], names).nonzero()[0]
        learner.learn(cps.Task(names, train=(pixels[mine], labels[mine].tolist())))
    new = 1200 + np.isin(labels[1200:], range(5)).nonzero()[0]
    expected = learner.predict(pixels[new])
    assert np.mean(np.equal(expected.classes, labels[new])) > 0.7  # it has learned something
    export_all(learner, tmp_path / "all.onnx")
    found, metadata = run_onnx(tmp_path / "all.onnx", pixels[new].float() / 255)
    assert json.loads(metadata["image"]) == {
        "shape": [3, 8, 8], "layout": "channels, height, width", "values": "floats from 0 to 1", "prepared": PREPARED,
        "scaled": 8,
    }  # fmt: skip
    assert [json.loads(metadata["classes"])[index] for index in found["class"].tolist()] == expected.classes
    torch.testing.assert_close(found["confidence"], expected.confidence, rtol=1e-3, atol=1e-4)
    export_task(learner, 1, tmp_path / "second.onnx")
    logits = run_onnx(tmp_path / "second.onnx", pixels[new].float() / 255)[0]["logits"]
    torch.testing.assert_close(logits, learner.evidence(pixels[new])[1].logits, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["plain.jpg", "turned.jpg", "plain.png", "clear.png", "grey.png", "palette.gif"])
def test_the_documented_image_preparation_gives_the_pixels_of_cps_predict(kind, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    names = {}
    exec(next(block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "def prepare" in block), names)
    photo, exif = Image.fromarray(load_sample_image("china.jpg")), Image.Exif()
    if kind == "turned.jpg":
        exif[0x0112] = 6  # a quarter turn
    if kind == "clear.png":
        photo.putalpha(Image.fromarray(load_sample_image("flower.jpg")).convert("L"))
    photo = photo.convert({"grey.png": "L", "palette.gif": "P"}.get(kind, photo.mode))
    photo.save(tmp_path / kind, exif=exif)
    for size in (32, 64):
        for scaled in (size, 2 * size):
            seen = ImageFormat(size, scaled / size - 1).decode(tmp_path / kind)
            assert np.array_equal(np.rint(names["prepare"](tmp_path / kind, size, scaled) * 255), seen)
            assert seen.std() > 20


def test_the_graph_of_one_task_returns_its_logits(learner, run_onnx, images, tmp_path):
    path = tmp_path / "second.onnx"
    done = export_task(learner, 1, path)
    found, metadata = run_onnx(path, images)
    torch.testing.assert_close(found["logits"], learner.evidence(images)[1].logits, rtol=1e-3, atol=1e-4)
    assert json.loads(metadata["classes"]) == [10, 11, 12]
    assert done.bytes == path.stat().st_size
    assert done.difference < 1e-4


class Branching(nn.Module):
    """Computes something different depending on the values, which no graph can hold."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 16)

    def forward(self, values):
        return self.layer(values / 255 if values.mean() > 10 else values).relu()


def test_a_backbone_that_no_graph_can_hold_is_exported_as_a_state_dict_only(make_learner, tmp_path, capfd, caplog):
    learner = make_learner(Branching())
    learner.learn(cps.Task([0, 1], train=(torch.randn(32, 8), [0, 1] * 16)))
    with pytest.raises(RuntimeError, match="cannot be exported as a graph"):
        export_task(learner, 0, tmp_path / "task.onnx")
    assert capfd.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []
    export_task(learner, 0, tmp_path / "task.safetensors")
    assert "cannot be traced" in caplog.text
    fresh = learner.extract(0)
    assert not fresh.training
    assert set(load_file(tmp_path / "task.safetensors")) == set(fresh.state_dict())


class NoGraphSelector:
    """A selector without the methods of a GraphSelector."""

    name = "NoGraph"


def test_a_selector_that_a_graph_cannot_hold_is_rejected_by_name(learner, tmp_path):
    with pytest.raises(ValueError, match="selector NoGraph cannot be part of a graph"):
        export_all(learner, tmp_path / "x.onnx", selector=NoGraphSelector())


def test_a_selector_without_statistics_of_a_task_is_rejected(learner, tmp_path):
    with pytest.raises(ValueError, match="ImportanceSignature-L1 has no 'mean' statistics of some task"):
        export_all(learner, tmp_path / "x.onnx", selector=cps.ImportanceSignature(norm=1))
