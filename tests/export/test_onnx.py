"""What is exported computes what the learner does, without cps."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from sklearn.datasets import load_digits, load_sample_image
from torch import nn
from typer.testing import CliRunner

import cps
from cps.cli import app
from cps.data.decode import decode_image
from cps.export.onnx import PREPARED, AllTasks, export_all, export_task
from samples import make_task

runner = CliRunner()


@pytest.fixture(scope="module")
def learner():
    """Return a learner of a builtin backbone with three tasks of different sizes."""
    training = cps.Training(2, cps.Adam(1e-2), batch_size=16)
    learner = cps.Learner(
        cps.Builtin("small"), pruner=cps.NNrelief(0.8), rounds=1, train=training, retrain=training,
        normalize=cps.Normalize((0.1, 0.2, 0.3), (0.5, 0.6, 0.7)), fabric=cps.make_fabric(accelerator="cpu"),
    )  # fmt: skip
    for index, classes in enumerate((2, 3, 2)):
        learner.learn(make_task(10 * index, classes=classes, shape=(3, 8, 8)))
    return learner


@pytest.fixture(scope="module")
def model(learner, tmp_path_factory):
    path = tmp_path_factory.mktemp("export") / "model.cps"
    learner.save(path)
    return path


@pytest.fixture(scope="module")
def images():
    """Return images that some subnetwork of each task is strong about."""
    found = torch.cat([make_task(10 * i, classes=c, shape=(3, 8, 8)).test[0] for i, c in enumerate((2, 3, 2))])
    return found.clamp(0, 1)


def run_onnx(path, images):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    found = session.run(None, {"images": images.numpy()})
    about = session.get_modelmeta().custom_metadata_map
    return {one.name: torch.from_numpy(value) for one, value in zip(session.get_outputs(), found, strict=True)}, about


@pytest.fixture(scope="module")
def whole_graph(model):
    """Return what `cps export --all` wrote and said."""
    path = model.with_name("all.onnx")
    done = runner.invoke(app, ["export", str(model), "--all", "--to", str(path)])
    assert done.exit_code == 0, done.output
    return path, done.output


def test_one_graph_of_all_tasks_answers_as_the_learner_does(learner, whole_graph, images):
    found, about = run_onnx(whole_graph[0], images)
    expected = learner.predict(images)
    names = json.loads(about["classes"])
    assert [names[index] for index in found["class"].tolist()] == expected.classes
    assert torch.equal(found["task"], expected.tasks)
    torch.testing.assert_close(found["confidence"], expected.confidence, rtol=1e-3, atol=1e-4)
    assert len(set(expected.tasks.tolist())) > 1  # else any graph that names one task would pass


def test_a_graph_takes_any_number_of_images(whole_graph, images):
    for number in (1, 7):
        assert run_onnx(whole_graph[0], images[:number])[0]["scores"].shape == (number, 3)


def test_a_graph_says_what_it_is(learner, whole_graph, images):
    about = run_onnx(whole_graph[0], images)[1]
    assert json.loads(about["tasks"])[1] == {"task": 2, "classes": [10, 11, 12]}
    low, high = learner.network.input_range
    assert low < 0
    assert high > 1
    assert json.loads(about["image"]) == {
        "shape": [3, 8, 8], "layout": "channels, height, width",
        "values": f"floats as learned, such as {low:g} to {high:g}",
    }  # fmt: skip
    assert about["selector"] == "Cascade"


def test_the_command_says_size_cost_and_how_far_onnxruntime_is_from_torch(whole_graph):
    assert "all 3 tasks" in whole_graph[1]
    for what in ("KiB", "parameters", "million operations", "onnxruntime and torch differ by", "on noise"):
        assert what in whole_graph[1]


def test_graphs_of_learned_digits_answer_in_onnxruntime_as_the_learner_does(tmp_path):
    images, labels = load_digits(return_X_y=True)
    pixels = torch.from_numpy(images.reshape(-1, 1, 8, 8) * 255 / 16).to(torch.uint8).expand(-1, 3, -1, -1)
    training = cps.Training(4, cps.Adam(1e-2), batch_size=32)
    fabric = cps.make_fabric(accelerator="cpu")  # as onnxruntime
    learner = cps.Learner(cps.Builtin("small"), rounds=1, train=training, retrain=training, fabric=fabric)
    for names in ([0, 1, 2], [3, 4]):
        mine = np.isin(labels[:1200], names).nonzero()[0]
        learner.learn(cps.Task(names, train=(pixels[mine], labels[mine].tolist())))
    new = 1200 + np.isin(labels[1200:], range(5)).nonzero()[0]
    expected = learner.predict(pixels[new])
    assert np.mean(np.equal(expected.classes, labels[new])) > 0.7  # it has learned something
    export_all(learner, tmp_path / "all.onnx")
    found, about = run_onnx(tmp_path / "all.onnx", pixels[new].float() / 255)
    assert json.loads(about["image"]) == {
        "shape": [3, 8, 8], "layout": "channels, height, width", "values": "floats from 0 to 1", "prepared": PREPARED,
    }  # fmt: skip
    assert [json.loads(about["classes"])[index] for index in found["class"].tolist()] == expected.classes
    torch.testing.assert_close(found["confidence"], expected.confidence, rtol=1e-3, atol=1e-4)
    export_task(learner, 1, tmp_path / "second.onnx")
    logits = run_onnx(tmp_path / "second.onnx", pixels[new].float() / 255)[0]["logits"]
    torch.testing.assert_close(logits, learner.evidence(pixels[new])[1].logits, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["plain.jpg", "turned.jpg", "plain.png", "clear.png", "grey.png", "palette.gif"])
def test_the_documented_preparation_gives_the_pixels_that_predict_sees(kind, tmp_path):
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
        seen = decode_image(tmp_path / kind, size)
        assert np.array_equal(np.rint(names["prepare"](tmp_path / kind, size) * 255), seen)
        assert seen.std() > 20


@pytest.mark.parametrize(
    "selector", [cps.MaxOutput(), cps.ImportanceSignature(), cps.ImportanceSignature(norm=1), cps.Cascade()]
)
def test_a_selector_scores_single_images_alike_inside_and_outside_a_graph(learner, images, selector):
    evidence = learner.evidence(images)
    statistics = []
    for task, subnetwork in enumerate(learner.network.subnetworks):
        labels = torch.arange(len(images)) % len(subnetwork.classes)
        statistics.append(selector.observe(subnetwork, evidence.until(task + 1), labels, statistics))
    alone = selector.alone(list(evidence), selector.ready(statistics))
    torch.testing.assert_close(alone, selector(evidence, statistics, torch.arange(len(images))))
    together = selector(evidence, statistics, torch.zeros(len(images), dtype=torch.long))
    assert not torch.allclose(alone[:1], together)  # the negative control


def test_all_tasks_in_one_module_select_by_numbers_that_the_model_keeps(learner, images):
    signature = learner.selectors[1]
    found = AllTasks(learner, signature)(images)
    assert torch.equal(found[1], learner.predict(images, selector=signature).tasks)


def test_one_task_as_a_graph_gives_its_logits(learner, model, images):
    path = model.with_name("second.onnx")
    done = export_task(learner, 1, path)
    found, about = run_onnx(path, images)
    torch.testing.assert_close(found["logits"], learner.evidence(images)[1].logits, rtol=1e-3, atol=1e-4)
    assert json.loads(about["classes"]) == [10, 11, 12]
    assert done.bytes == path.stat().st_size
    assert done.difference < 1e-4


def test_a_state_dict_holds_the_subnetwork_and_how_it_is_joined(learner, model, images):
    path = model.with_name("second.safetensors")
    done = runner.invoke(app, ["export", str(model), "--task", "2", "--to", str(path)])
    assert done.exit_code == 0, done.output
    module = learner.extract(1)
    before = module(images)
    for parameter in module.parameters():
        parameter.data.zero_()
    assert not torch.equal(module(images), before)
    module.load_state_dict(load_file(path))
    assert torch.equal(module(images), before)
    with safe_open(path, framework="pt") as file:
        about = file.metadata()
    assert json.loads(about["classes"]) == [10, 11, 12]
    layers = json.loads(about["layers"])
    assert "Conv2d" in layers["backbone.layers.0"]
    assert "layers_0" in about["forward"]


class Strange:
    """A selector that a graph cannot hold."""

    name = "Strange"


def test_a_selector_that_a_graph_cannot_hold_is_refused_by_name(learner, tmp_path):
    with pytest.raises(ValueError, match="selector Strange cannot be put into a graph"):
        export_all(learner, tmp_path / "x.onnx", selector=Strange())


def test_a_selector_that_was_not_there_when_a_task_was_learned_is_refused(learner, tmp_path):
    with pytest.raises(ValueError, match="ImportanceSignature-L1 has kept no 'mean' about some task"):
        export_all(learner, tmp_path / "x.onnx", selector=cps.ImportanceSignature(norm=1))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "say which task with --task, or --all"),
        (["--task", "1", "--all"], "say which task with --task, or --all"),
        (["--task", "1", "--selector", "MaxOutput"], "one task needs no --selector"),
    ],
)
def test_a_wrong_command_ends_with_2(model, arguments, said):
    done = runner.invoke(app, ["export", str(model), "--to", "x.onnx", *arguments])
    assert done.exit_code == 2
    assert said in re.sub(r"[\s│]+", " ", done.output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "4", "--to", "x.onnx"], "there is no task 4"),
        (["--task", "1", "--to", "x.pt"], "ends in .onnx"),
        (["--all", "--to", "x.safetensors"], "ends in .onnx"),
        (["--all", "--selector", "Oracle", "--to", "x.onnx"], "there are: Cascade, MaxOutput, ImportanceSignature"),
    ],
)
def test_mistakes_are_said_in_one_line_and_nothing_is_written(model, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = runner.invoke(app, ["export", str(model), *arguments])
    assert done.exit_code == 1
    assert message in done.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("package", "command", "extra"),
    [("onnxscript", ["--task", "1", "--to", "x.onnx"], "[export]"), ("fastapi", ["--port", "0"], "[serve]")],
)
def test_a_missing_package_is_named_with_what_to_install(model, package, command, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    for name in [name for name in sys.modules if name == "cps.serve.server"]:
        monkeypatch.delitem(sys.modules, name)
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else find(name))
    done = runner.invoke(app, [extra.strip("[]"), str(model), *command])
    assert done.exit_code == 1
    assert f'pip install "continual-prune-and-select{extra}"' in done.output


def test_without_onnxruntime_the_graph_is_written_and_said_to_be_unchecked(learner, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "onnxruntime" else find(name))
    assert export_task(learner, 0, tmp_path / "x.onnx").difference is None
    assert (tmp_path / "x.onnx").exists()


def test_a_graph_that_computes_something_else_is_not_written(learner, tmp_path, monkeypatch):
    (tmp_path / "x.onnx").write_text("what was there before")
    monkeypatch.setattr("cps.export.onnx.ROUNDING", -1.0)
    with pytest.raises(RuntimeError, match="computes something else"):
        export_task(learner, 0, tmp_path / "x.onnx")
    assert (tmp_path / "x.onnx").read_text() == "what was there before"
    assert [path.name for path in tmp_path.iterdir()] == ["x.onnx"]


def test_a_backbone_that_fixes_the_number_of_images_is_refused_in_words(make_learner, tmp_path):
    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.first = nn.Linear(72, 8), nn.Parameter(torch.zeros(1, 72))

        def forward(self, x):
            return self.layer(x.flatten(1) + self.first.expand(len(x), -1))

    learner = make_learner(Counted())
    learner.learn(make_task(0))
    with pytest.raises(RuntimeError, match=r"use x.shape\[0\] instead of len\(x\)"):
        export_task(learner, 0, tmp_path / "graph.onnx")
    assert not list(tmp_path.iterdir())


class Branching(torch.nn.Module):
    """Does otherwise for other values, which no graph can hold."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 16)

    def forward(self, values):
        return self.layer(values / 255 if values.mean() > 10 else values).relu()


def test_a_backbone_that_no_graph_can_hold_is_refused_in_words_and_its_weights_are_written(
    make_learner, tmp_path, capfd, caplog
):
    learner = make_learner(Branching())
    learner.learn(cps.Task([0, 1], train=(torch.randn(32, 8), [0, 1] * 16)))
    with pytest.raises(RuntimeError, match="cannot be written as a graph"):
        cps.export_task(learner, 0, tmp_path / "task.onnx")
    assert capfd.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []
    cps.export_task(learner, 0, tmp_path / "task.safetensors")
    assert "cannot be traced" in caplog.text
    fresh = learner.extract(0)
    assert not fresh.training
    assert set(load_file(tmp_path / "task.safetensors")) == set(fresh.state_dict())
