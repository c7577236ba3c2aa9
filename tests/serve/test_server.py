"""The server: right answers, plain refusals, and a model that is read again when its file changes."""

import io
import random
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
import torch
from fuzz.odd_files import reseal
from PIL import Image
from served import LIMITS, SIZE, eventually, learn, learned, picture, post, serving_at

import cps
from cps.data import decode as decoding
from cps.data.decode import decode_image
from cps.serve import server as serving
from cps.serve import uploads
from cps.serve.middleware import Limits
from cps.serve.served_model import ServedModel
from cps.storage import reload as following
from cps.storage.reload import ReloadedFile
from samples import make_task


@pytest.fixture(scope="module")
def learner():
    return learned()


@pytest.fixture(scope="module")
def model(learner, tmp_path_factory):
    path = tmp_path_factory.mktemp("served") / "model.cps"
    learner.save(path)
    return path


@pytest.fixture(scope="module")
def address(model):
    with serving_at(model, hosts={"127.0.0.1", "localhost"}) as address:
        yield address


def decoded(contents):
    return torch.stack([torch.from_numpy(decode_image(io.BytesIO(content), SIZE)) for content in contents])


def expected(learner, contents, **how):
    return learner.predict(decoded(contents), reject=0.01, **how)


def shown(names):
    return [name.encode("utf-8", "replace").decode() if isinstance(name, str) else name for name in names]


def test_the_server_answers_as_the_learner_does(address, learner):
    contents = [picture(seed, kind=kind) for seed, kind in enumerate(("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"))]
    reply = post(address, *((f"{index}.img", content) for index, content in enumerate(contents)))
    assert reply.status_code == 200, reply.text
    found, wanted = reply.json()["images"], expected(learner, contents)
    assert [image["file"] for image in found] == [f"{index}.img" for index in range(6)]
    assert [image["class"] for image in found] == shown(wanted.classes)
    assert [image["task"] for image in found] == [task + 1 for task in wanted.tasks.tolist()]
    np.testing.assert_allclose([image["confidence"] for image in found], wanted.confidence, rtol=1e-5)
    for image in found:
        best = max(image["tasks"], key=lambda task: task["score"])
        assert (best["task"], best["class"]) == (image["task"], image["class"])
        assert sum(task["share"] for task in image["tasks"]) == pytest.approx(1)


def test_images_that_belong_together_are_found_in_one_task(address, learner):
    contents = [picture(seed) for seed in (0, 1, 4, 5, 8, 2)]
    alone, together = expected(learner, contents), expected(learner, contents, group_size=6)
    assert alone.classes != together.classes  # else this would show nothing
    reply = post(address, *((str(index), content) for index, content in enumerate(contents)), group="true").json()
    assert reply["group"] is True
    assert [image["class"] for image in reply["images"]] == shown(together.classes)


def test_an_unknown_image_has_no_class_but_a_nearest_task(model, learner):
    images = decoded([picture(seed) for seed in range(12)])
    host = ServedModel(model, LIMITS, reject=0.5)
    found, wanted = host.predict(host.model, images, [""] * 12, group=False), learner.predict(images, reject=0.5)
    assert {image.unknown for image in found} == {True, False}
    for image, name, task in zip(found, wanted.classes, wanted.tasks.tolist(), strict=True):
        assert (image.class_, image.unknown, image.task) == (*shown([name]), name is None, task + 1)
        assert image.tasks[task].class_ is not None


def test_the_model_tells_about_itself(address, learner):
    about = httpx.get(f"{address}/model").json()
    assert about["file"] == "model.cps"
    assert about["image_size"] == SIZE
    assert about["limits"] == {"images": 6, "megabytes": 1, "megapixels": 1}
    for task, info in enumerate(about["tasks"]):
        assert (info["fingerprint"], info["outputs"]) == learner.fingerprint(task)
        assert info["classes"] == shown(learner.network.subnetworks[task].classes)
        assert info["density"] == pytest.approx(learner.network.density(task))
    assert about["tasks"][0]["notes"] == {"day": "2026-11-15"}
    taken = [mask.expand_as(weight) for mask, weight in zip(
        learner.network.taken.values(), learner.network.weights.values(), strict=True,
    )]  # fmt: skip
    assert about["free"] == pytest.approx(1 - torch.cat([mask.flatten() for mask in taken]).double().mean().item())


def large_png():
    file = io.BytesIO()
    Image.new("1", (1001, 1000)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("uploads", "fields", "status", "sentence"),
    [
        ([], {}, 422, "expected one or more image files as 'images'"),
        ([("empty.png", b"")], {}, 415, "'empty.png' is empty"),
        ([("text.png", b"this is no image")], {}, 415, "'text.png' is not an image that can be read"),
        ([("page.svg", b"<svg xmlns='http://www.w3.org/2000/svg'/>")], {}, 415, "is not an image"),
        ([("script.eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")], {}, 415, "is not an image"),
        ([("short.png", picture(0)[:300])], {}, 415, "'short.png' is damaged, or cut short"),
        ([("bad.png", b"x"), ("empty.png", b"")], {}, 415, "'bad.png'"),
        ([("wide.png", large_png())], {}, 415, "'wide.png' has 1001 x 1000 pixels, more than 1 million"),
        ([(f"{i}.png", picture(i)) for i in range(7)], {}, 413, "7 images are more than the 6 of one request"),
        ([("noise.png", picture(0, side=700))], {}, 413, "larger than 1 MiB"),
        ([("good.png", picture(0))], {"group": "perhaps"}, 422, "expected true or false as 'group'"),
        ([("good.png", picture(0))], {"task": "one"}, 422, "expected a number from 1 as 'task'"),
        ([("good.png", picture(0))], {"task": "9"}, 422, "there is no task 9; the model has"),
        ([("good.png", picture(0))], {"reject": "0"}, 422, "there is no field 'reject'; there are: group, images, task"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_a_bad_request_is_refused_in_one_plain_sentence(address, uploads, fields, status, sentence):
    reply = post(address, *uploads, **fields)
    assert reply.status_code == status, reply.text
    assert sentence in reply.json()["error"]


@pytest.mark.parametrize("group", [False, True])
def test_images_that_cannot_be_read_get_an_error_each_and_the_others_an_answer(address, learner, group):
    good, bad = [picture(seed) for seed in (0, 1, 4, 2)], {"text.png": b"no image", "wide.png": large_png()}
    uploads = [("0.png", good[0]), *bad.items(), *((f"{i}.png", good[i]) for i in (1, 2, 3))]
    reply = post(address, *uploads, group=str(group).lower())
    assert reply.status_code == 200, reply.text
    found = reply.json()["images"]
    assert [image["file"] for image in found] == [name for name, _ in uploads]
    answered = [image for image in found if image["error"] is None]
    alone, together = expected(learner, good), expected(learner, good, group_size=4)
    assert alone.classes != together.classes  # else a group would show nothing
    assert [(image["file"], image["class"]) for image in answered] == list(
        zip(("0.png", "1.png", "2.png", "3.png"), shown((together if group else alone).classes), strict=True)
    )
    for image in found[1:3]:
        assert image.pop("file") in image.pop("error")
        assert set(image.values()) == {None}


def test_where_no_image_can_be_read_each_error_is_told(address):
    reply = post(address, ("bad.png", b"x"), ("empty.png", b""), group="true")
    assert reply.status_code == 415
    errors = [image["error"] for image in reply.json()["images"]]
    assert reply.json()["error"] == errors[0]
    assert "'empty.png' is empty" in errors[1]


def test_a_body_of_unknown_length_is_bounded_too(address):
    def endless():
        for _ in range(64):
            yield bytes(2**16)

    reply = httpx.post(
        f"{address}/predict", content=endless(), headers={"content-type": "multipart/form-data; boundary=x"}
    )
    assert reply.status_code == 413
    assert "larger than 1 MiB" in reply.json()["error"]


def test_what_is_not_there_and_what_is_not_asked_so_is_said_in_json(address):
    missing = httpx.get(f"{address}/nothing").json()["error"]
    for path in ("/docs", "/openapi.json", "/predict", "/model", "/health"):
        assert path in missing
        reply = httpx.delete(f"{address}{path}")
        assert reply.status_code == 405
        method = {"/predict": "POST", "/openapi.json": "GET or HEAD"}.get(path, "GET")
        assert reply.json()["error"].endswith(f"; use {method} {path}")


def test_who_only_asks_whether_something_is_there_gets_no_body(address):
    for path in ("/", "/docs", "/model", "/health", "/openapi.json"):
        reply = httpx.head(f"{address}{path}")
        assert (reply.status_code, reply.content) == (200, b"")
    assert httpx.head(f"{address}/predict").status_code == 405


def test_a_model_that_found_no_memory_is_tried_again_and_its_problem_is_told_once(tmp_path, monkeypatch, caplog):
    path, tries = tmp_path / "model.cps", []

    def make():
        tries.append(path.read_text())
        if 2 <= len(tries) <= 3:
            raise MemoryError("no memory is left")
        return tries[-1]

    path.write_text("first")
    followed = ReloadedFile(path, make)
    path.write_text("second, longer")
    assert not followed.refresh()
    assert (followed.made, followed.problem) == ("first", "no memory is left")
    assert not followed.refresh()  # not so soon
    assert len(tries) == 2
    monkeypatch.setattr(following, "AGAIN", -1.0)
    assert [followed.refresh() for _ in range(3)] == [False, True, False]
    assert (followed.made, followed.problem) == ("second, longer", None)
    assert caplog.text.count("no memory is left") == 1


def test_damaged_images_never_break_the_server(address):
    chance = random.Random(0)
    seen = set()
    for index in range(80):
        content = bytearray(picture(index % 5, kind=("PNG", "JPEG", "WEBP", "TIFF", "GIF")[index % 5]))
        for _ in range(chance.choice((1, 4, 30))):
            content[chance.randrange(len(content))] = chance.randrange(256)
        kept = chance.choice((len(content), chance.randrange(1, len(content))))
        seen.add(post(address, ("x", bytes(content[:kept]))).status_code)
    assert seen <= {200, 415}
    assert {200, 415} <= seen


def test_names_of_files_are_never_paths(address, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("../../model.cps", "/etc/passwd", "a\\b", "x" * 5000, "é\n\"'<script>"):
        reply = post(address, (name, picture(1)))
        assert reply.status_code in (200, 400), name
        if reply.status_code == 200:
            assert len(reply.json()["images"][0]["file"]) <= 200
    assert list(tmp_path.iterdir()) == []


def test_many_at_once_get_the_right_answer_or_are_told_to_come_back(address, learner):
    contents = [picture(seed) for seed in range(60)]
    wanted = shown(expected(learner, contents).classes)
    with ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(lambda content: post(address, ("x.png", content)), contents))
    assert {reply.status_code for reply in replies} <= {200, 503}
    right = [
        reply.json()["images"][0]["class"] == name
        for reply, name in zip(replies, wanted, strict=True)
        if reply.is_success
    ]
    assert all(right)
    assert len(right) >= 12


def test_the_server_takes_a_grown_model_and_refuses_a_damaged_one(model, tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "LOOK_AGAIN", 0.02)
    path = tmp_path / "model.cps"
    path.write_bytes(model.read_bytes())
    with serving_at(path) as address:
        first = httpx.get(f"{address}/model").json()
        started = httpx.get(f"{address}/health").json()
        assert started["status"] == "ok"
        path.write_bytes(model.read_bytes()[:-100])
        health = eventually(address, lambda health: health["problem"])
        assert health["status"] == "old model"
        assert "damaged" in health["problem"]
        assert httpx.get(f"{address}/model").json() == first
        assert post(address, ("x.png", picture(0))).status_code == 200
        path.unlink()
        eventually(address, lambda health: "there is no file" in (health["problem"] or ""))
        grown = cps.load(model)
        learn(grown, 2)
        grown.save(path)
        eventually(address, lambda health: health["problem"] is None and health["loaded"] != started["loaded"])
        now = httpx.get(f"{address}/model").json()
        assert [task["classes"] for task in now["tasks"]][2] == ["a", "b"]
        assert now["tasks"][:2] == first["tasks"]  # old fingerprints stay
        assert len(post(address, ("x.png", picture(0))).json()["images"][0]["tasks"]) == 3


def test_a_model_that_computes_no_numbers_is_served_without_a_server_error(model, tmp_path):
    broken = cps.load(model)
    for subnetwork in broken.network.subnetworks:
        subnetwork.head["bias"].fill_(float("nan"))
    reseal(broken)
    broken.save(tmp_path / "model.cps")
    with serving_at(tmp_path / "model.cps") as address:
        reply = post(address, ("x.png", picture(0)))
    assert reply.status_code == 200
    assert reply.json()["images"][0]["confidence"] is None


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 6)])
def test_a_model_of_other_than_square_colour_images_is_refused_at_the_start(shape, tmp_path):
    learner = cps.Learner(cps.Builtin("small", shape[0]), rounds=0, train=cps.Training(1))
    learner.save(tmp_path / "model.cps")
    with pytest.raises(ValueError, match="learned nothing yet"):
        ServedModel(tmp_path / "model.cps", LIMITS)
    learner.learn(make_task(0, shape=shape))
    learner.save(tmp_path / "model.cps")
    with pytest.raises(ValueError, match="served are colour images"):
        ServedModel(tmp_path / "model.cps", LIMITS)


def test_a_server_on_this_machine_answers_to_no_other_name(address):
    reply = httpx.get(f"{address}/model", headers={"host": "evil.example"})
    assert reply.status_code == 400
    assert "does not answer to the name 'evil.example'" in reply.json()["error"]
    assert httpx.get(f"{address}/model", headers={"host": "localhost:9"}).status_code == 200


def test_a_task_that_is_told_is_the_one_that_answers(address, learner):
    content = [picture(index) for index in range(3)]
    reply = post(address, *((f"{i}.png", each) for i, each in enumerate(content)), task="2").json()
    warned = learner.predict(decoded(content), task=1)
    assert [image["task"] for image in reply["images"]] == [2] * 3
    assert [image["tasks"][1]["class"] for image in reply["images"]] == shown(warned.classes)


def test_more_pixels_than_are_ever_read_are_refused_as_such_whatever_the_limit(monkeypatch):
    monkeypatch.setattr(decoding, "LARGEST", 2_000_000)
    monkeypatch.setattr(uploads, "LARGEST", 2_000_000)
    large = io.BytesIO()
    Image.new("L", (2000, 1500)).save(large, "PNG")
    with pytest.raises(decoding.ImageError, match="has 2000 x 1500 pixels, more than 2 million; send a smaller image"):
        uploads.pixels_of(uploads.Upload("large.png", large.getvalue()), 8, Limits(megapixels=100))
