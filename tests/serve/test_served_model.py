"""The served model: same predictions as the learner, reloaded when its file changes."""

import httpx
import pytest
import torch
from fuzz.malformed_files import reseal
from served import LIMITS, SIZE, decode, encodable, image_file, learn_task, post_images, serve, wait_for_health

import cps
from cps.serve import server
from cps.serve.served_model import ServedModel
from samples import make_task


def test_an_unknown_image_has_no_class_but_the_closest_task(model, learner):
    known, grey = (
        decode([image_file(seed) for seed in range(6)]),
        torch.full((6, 3, SIZE, SIZE), 128, dtype=torch.uint8),
    )
    images, served = torch.cat([known, grey]), ServedModel(model, LIMITS, reject=0.05)
    found, expected = served.predict(served.model, images, [""] * 12, group=False), learner.predict(images, reject=0.05)
    assert {image.unknown for image in found} == {True, False}
    for image, name, task in zip(found, expected.classes, expected.tasks.tolist(), strict=True):
        assert (image.class_, image.unknown, image.task) == (*encodable([name]), name is None, task + 1)
        assert image.tasks[task].class_ is not None


def test_the_class_and_confidence_of_every_subnetwork_are_those_with_the_task_given(model, learner):
    images = decode([image_file(seed) for seed in range(6)])
    served = ServedModel(model, LIMITS)
    found = served.predict(served.model, images, [""] * 6, group=False)
    for task in range(2):
        expected = learner.predict(images, task=task)
        assert [image.tasks[task].class_ for image in found] == encodable(expected.classes)
        assert [image.tasks[task].confidence for image in found] == expected.confidence.tolist()


def test_a_grown_model_is_loaded_and_a_damaged_one_is_not(model, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "RELOAD_SECONDS", 0.02)
    path = tmp_path / "model.cps"
    path.write_bytes(model.read_bytes())
    with serve(path) as address:
        first = httpx.get(f"{address}/model").json()
        started = httpx.get(f"{address}/health").json()
        assert started["status"] == "ok"
        path.write_bytes(model.read_bytes()[:-100])
        health = wait_for_health(address, lambda health: health["problem"])
        assert health["status"] == "old model"
        assert "damaged" in health["problem"]
        assert httpx.get(f"{address}/model").json() == first
        assert post_images(address, ("x.png", image_file(0))).status_code == 200
        path.unlink()
        wait_for_health(address, lambda health: "there is no file" in (health["problem"] or ""))
        grown = cps.load(model)
        learn_task(grown, 2)
        grown.save(path)
        wait_for_health(address, lambda health: health["problem"] is None and health["loaded"] != started["loaded"])
        now = httpx.get(f"{address}/model").json()
        assert [task["classes"] for task in now["tasks"]][2] == ["a", "b"]
        assert now["tasks"][:2] == first["tasks"]  # with the same fingerprints
        assert len(post_images(address, ("x.png", image_file(0))).json()["images"][0]["tasks"]) == 3


def test_a_model_with_nan_outputs_is_served_without_a_server_error(model, tmp_path):
    broken = cps.load(model)
    for subnetwork in broken.network.subnetworks:
        subnetwork.head["bias"].fill_(float("nan"))
    reseal(broken)
    broken.save(tmp_path / "model.cps")
    with serve(tmp_path / "model.cps") as address:
        reply = post_images(address, ("x.png", image_file(0)))
    assert reply.status_code == 200
    assert reply.json()["images"][0]["confidence"] is None


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 6)])
def test_only_models_of_square_colour_images_can_be_served(shape, tmp_path):
    learner = cps.Learner(cps.Architecture("small", shape[0]), rounds=0, train=cps.Training(1))
    learner.save(tmp_path / "model.cps")
    with pytest.raises(ValueError, match="has learned no task yet"):
        ServedModel(tmp_path / "model.cps", LIMITS)
    learner.learn(make_task(0, shape=shape))
    learner.save(tmp_path / "model.cps")
    with pytest.raises(ValueError, match="its images must be colour images"):
        ServedModel(tmp_path / "model.cps", LIMITS)
