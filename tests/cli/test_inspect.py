"""`cps inspect` as text and as JSON."""

import json
from xml.etree import ElementTree

import pytest
import torch

import cps
from commands import rewrite_model, run_cps
from cps.network.masks import density


def test_inspect_prints_tasks_capacity_and_fingerprints(trained):
    model = trained[0] / "parts.cps"
    printed = run_cps("inspect", model).output
    for word in ("bolt", "backbone small", "tasks 2, classes 4", "fullest"):
        assert word in printed, word
    found = json.loads(run_cps("inspect", model, "--json").stdout)
    learner = cps.load(model)
    for index, task in enumerate(found["tasks"]):
        assert task["task"] == index + 1
        assert task["density"] == pytest.approx(learner.network.density(index))
        assert task["fingerprint"] == learner.network.subnetworks[index].digest_in(learner.network.weights, {})
        notes = dict(learner.network.subnetworks[index].notes)
        assert set(notes.pop("image digests")) == set(task["classes"])  # of no use to readers
        assert task["notes"] == notes
    assert found["free"] == pytest.approx(1 - density(learner.network.taken, learner.network.weights))
    assert found["bytes"] == model.stat().st_size
    assert [each["class"] for each in found["accuracy"]] == ["bolt", "nut", "gear", "spring"]
    assert all(each["held_out"] == 2 >= each["right"] for each in found["accuracy"])


def test_inspect_writes_the_confusion_matrix_as_a_picture(trained, tmp_path):
    run_cps("inspect", trained[0] / "parts.cps", "--picture", tmp_path / "confusion.svg")
    picture = ElementTree.parse(tmp_path / "confusion.svg").getroot()
    assert {"bolt", "nut", "gear", "spring"} <= {text.text for text in picture.iter() if text.tag.endswith("text")}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("taken/layers.0.weight", torch.zeros(12)),
        ("taken/layers.0.weight", torch.zeros(3, dtype=torch.uint8)),
        ("weight/layers.0.weight", torch.zeros(())),
    ],
)
def test_tensors_of_a_wrong_shape_or_type_are_rejected(model, name, value):
    rewrite_model(model, lambda header, tensors, metadata: tensors.update({name: value}))
    output = run_cps("inspect", model, code=1).output.replace("\n", " ")
    assert "is inconsistent: tensor 'taken/layers.0.weight' is" in output
    assert "expected uint8" in output
