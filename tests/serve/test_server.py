"""The HTTP server: same predictions as the learner, and every error is one sentence of JSON."""

import io
from concurrent.futures import ThreadPoolExecutor
from xml.etree import ElementTree

import httpx
import numpy as np
import pytest
import torch
from fuzz.server import fuzz_server
from PIL import Image
from served import SIZE, decode, encodable, image_file, post_images


def predict(learner, contents, **settings):
    return learner.predict(decode(contents), reject=0.01, **settings)


def large_png():
    file = io.BytesIO()
    Image.new("1", (1001, 1000)).save(file, "PNG")
    return file.getvalue()


def test_the_server_predicts_as_the_learner_does(address, learner):
    contents = [image_file(seed, kind=kind) for seed, kind in enumerate(("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"))]
    reply = post_images(address, *((f"{index}.img", content) for index, content in enumerate(contents)))
    assert reply.status_code == 200, reply.text
    found, expected = reply.json()["images"], predict(learner, contents)
    assert [image["file"] for image in found] == [f"{index}.img" for index in range(6)]
    assert [image["class"] for image in found] == encodable(expected.classes)
    assert [image["task"] for image in found] == [task + 1 for task in expected.tasks.tolist()]
    np.testing.assert_allclose([image["confidence"] for image in found], expected.confidence, rtol=1e-5)
    for image in found:
        best = max(image["tasks"], key=lambda task: task["score"])
        assert (best["task"], best["class"]) == (image["task"], image["class"])
        assert image["share"] == best["share"]
        assert sum(task["share"] for task in image["tasks"]) == pytest.approx(1)


def test_images_of_a_group_share_a_task(address, learner):
    contents = [image_file(seed) for seed in (0, 1, 4, 5, 8, 2)]
    single, grouped = predict(learner, contents), predict(learner, contents, group_size=6)
    assert single.classes != grouped.classes  # otherwise this test would show nothing
    uploads = [(str(index), content) for index, content in enumerate(contents)]
    reply = post_images(address, *uploads, group="true").json()
    assert reply["group"] is True
    assert [image["class"] for image in reply["images"]] == encodable(grouped.classes)


def test_with_the_task_given_its_subnetwork_predicts(address, learner):
    contents = [image_file(index) for index in range(3)]
    reply = post_images(address, *((f"{i}.png", each) for i, each in enumerate(contents)), task="2").json()
    expected = learner.predict(decode(contents), task=1)
    assert [image["task"] for image in reply["images"]] == [2] * 3
    assert [image["share"] for image in reply["images"]] == [1] * 3
    assert [image["tasks"][1]["class"] for image in reply["images"]] == encodable(expected.classes)


def test_the_model_reply_describes_the_model(address, learner):
    described = httpx.get(f"{address}/model").json()
    assert described["file"] == "model.cps"
    assert described["image_size"] == SIZE
    assert described["limits"] == {"images": 6, "megabytes": 1, "megapixels": 1}
    for task, info in enumerate(described["tasks"]):
        assert (info["fingerprint"], info["outputs"]) == learner.fingerprint(task)
        assert info["classes"] == encodable(learner.network.subnetworks[task].classes)
        assert info["density"] == pytest.approx(learner.network.density(task))
    assert described["tasks"][0]["notes"] == {"day": "2026-11-15"}
    assert "image digests" not in described["tasks"][1]["notes"]
    assert {"class": "7", "right": 3, "held_out": 4} in described["accuracy"]
    assert described["confused"] == [{"classes": ["7", "cat"], "images": 1}]
    taken = [mask.expand_as(weight) for mask, weight in zip(
        learner.network.taken.values(), learner.network.weights.values(), strict=True,
    )]  # fmt: skip
    assert described["free"] == pytest.approx(1 - torch.cat([mask.flatten() for mask in taken]).double().mean().item())


@pytest.mark.parametrize(
    ("uploads", "fields", "status", "message"),
    [
        ([], {}, 422, "Field 'images' must have one or more image files"),
        ([("empty.png", b"")], {}, 415, "'empty.png' is empty"),
        ([("text.png", b"this is no image")], {}, 415, "'text.png' is not an image in a supported format"),
        ([("page.svg", b"<svg xmlns='http://www.w3.org/2000/svg'/>")], {}, 415, "is not an image"),
        ([("script.eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")], {}, 415, "is not an image"),
        ([("short.png", image_file(0)[:300])], {}, 415, "'short.png' is damaged or incomplete"),
        ([("bad.png", b"x"), ("empty.png", b"")], {}, 415, "'bad.png'"),
        ([("wide.png", large_png())], {}, 415, "'wide.png' has 1001 x 1000 pixels, more than 1 million"),
        ([(f"{i}.png", image_file(i)) for i in range(7)], {}, 413, "At most 6 images are allowed, got 7"),
        ([("noise.png", image_file(0, side=700))], {}, 413, "larger than 1 MiB"),
        ([("good.png", image_file(0))], {"group": "perhaps"}, 422, "Field 'group' must be true or false"),
        ([("good.png", image_file(0))], {"task": "one"}, 422, "Field 'task' must be an integer, 1 or more"),
        ([("good.png", image_file(0))], {"task": "0"}, 422, "Field 'task' must be an integer, 1 or more"),
        ([("good.png", image_file(0))], {"task": "9"}, 422, "Unknown task 9: choose from 1 to 2"),
        ([("good.png", image_file(0))], {"reject": "0"}, 422, "Unknown field 'reject': choose from group, images, task"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_a_bad_request_is_rejected_in_one_sentence(address, uploads, fields, status, message):
    reply = post_images(address, *uploads, **fields)
    assert reply.status_code == status, reply.text
    assert message in reply.json()["error"]


@pytest.mark.parametrize("group", [False, True])
def test_unreadable_images_get_an_error_each_and_the_others_are_predicted(address, learner, group):
    good, bad = [image_file(seed) for seed in (0, 1, 4, 2)], {"text.png": b"no image", "wide.png": large_png()}
    uploads = [("0.png", good[0]), *bad.items(), *((f"{i}.png", good[i]) for i in (1, 2, 3))]
    reply = post_images(address, *uploads, group=str(group).lower())
    assert reply.status_code == 200, reply.text
    found = reply.json()["images"]
    assert [image["file"] for image in found] == [name for name, _ in uploads]
    predicted = [image for image in found if image["error"] is None]
    single, grouped = predict(learner, good), predict(learner, good, group_size=4)
    assert single.classes != grouped.classes  # otherwise a group would show nothing
    assert [(image["file"], image["class"]) for image in predicted] == list(
        zip(("0.png", "1.png", "2.png", "3.png"), encodable((grouped if group else single).classes), strict=True)
    )
    for image in found[1:3]:
        assert image.pop("file") in image.pop("error")
        assert set(image.values()) == {None}


def test_if_no_image_can_be_read_the_reply_has_every_error(address):
    reply = post_images(address, ("bad.png", b"x"), ("empty.png", b""), group="true")
    assert reply.status_code == 415
    errors = [image["error"] for image in reply.json()["images"]]
    assert reply.json()["error"] == errors[0]
    assert "'empty.png' is empty" in errors[1]


def test_unknown_paths_and_methods_get_a_json_error_with_the_right_ones(address):
    missing = httpx.get(f"{address}/nothing").json()["error"]
    for path in ("/docs", "/openapi.json", "/predict", "/model", "/health"):
        assert path in missing
        reply = httpx.delete(f"{address}{path}")
        assert reply.status_code == 405
        method = {"/predict": "POST", "/openapi.json": "GET or HEAD"}.get(path, "GET")
        assert reply.json()["error"] == f"Method not allowed: use {method} {path}."


def test_the_confusion_matrix_is_a_picture_that_can_run_nothing(address):
    reply = httpx.get(f"{address}/confusion.svg")
    assert reply.headers["content-type"] == "image/svg+xml"
    assert reply.headers["content-security-policy"] == "default-src 'none'; sandbox"
    texts = [text.text for text in ElementTree.fromstring(reply.content).iter() if text.tag.endswith("text")]
    assert "<b>dog</b>" in texts


def test_head_requests_get_no_body(address):
    for path in ("/", "/docs", "/model", "/confusion.svg", "/health", "/metrics", "/openapi.json"):
        reply = httpx.head(f"{address}{path}")
        assert (reply.status_code, reply.content) == (200, b"")
    assert httpx.head(f"{address}/predict").status_code == 405


def test_concurrent_requests_get_the_right_prediction_or_503(address, learner):
    contents = [image_file(seed) for seed in range(60)]
    expected = encodable(predict(learner, contents).classes)
    with ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(lambda content: post_images(address, ("x.png", content)), contents))
    assert {reply.status_code for reply in replies} <= {200, 503}
    right = [
        reply.json()["images"][0]["class"] == name
        for reply, name in zip(replies, expected, strict=True)
        if reply.is_success
    ]
    assert all(right)
    assert len(right) >= 12


@pytest.mark.slow
def test_schemathesis_finds_no_server_error(address, tmp_path):
    made, passed, output = fuzz_server(address, "--max-examples", "20", "--generation-deterministic", folder=tmp_path)
    assert made == passed > 40, output[-3000:]
