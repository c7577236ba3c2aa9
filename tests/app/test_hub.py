"""Models in repositories of the Hugging Face Hub: a local folder, and a hub on the loopback interface."""

import base64
import json
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import cps
from samples import conv_net, make_task

COMMIT = "0" * 39 + "1"


def same_model(one, other):
    tasks = range(len(one.classes))
    return [one.fingerprint(task) for task in tasks] == [other.fingerprint(task) for task in tasks]


@contextmanager
def local_hub(folder):
    """Serve repositories of a folder with the requests that huggingface_hub makes; yield the address."""

    class Handler(BaseHTTPRequestHandler):
        def reply(self, body, **headers):
            self.send_response(200)
            for name, value in {"Content-Length": len(body), "X-Repo-Commit": COMMIT, **headers}.items():
                self.send_header(name.replace("_", "-"), str(value))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_POST(self):
            lines = self.rfile.read(int(self.headers["Content-Length"])).decode().splitlines()
            if self.path.endswith("/preupload/main"):
                files = [
                    {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for each in json.loads(lines[0])["files"]
                ]
                return self.reply(json.dumps({"files": files}).encode())
            if self.path.endswith("/commit/main"):
                for each in map(json.loads, lines):
                    if each["key"] == "file":
                        (folder / each["value"]["path"]).write_bytes(base64.b64decode(each["value"]["content"]))
                address = f"http://{self.headers['Host']}/me/parts"
                reply = {"commitUrl": f"{address}/commit/{COMMIT}", "commitOid": COMMIT, "success": True}
                return self.reply(json.dumps(reply).encode())
            return self.reply(json.dumps({"url": f"http://{self.headers['Host']}/me/parts", "id": "me/parts"}).encode())

        def do_GET(self):
            if "/resolve/" not in self.path:
                return self.reply(json.dumps({"siblings": [], "sha": COMMIT}).encode())
            return self.reply((folder / self.path.rpartition("/")[2]).read_bytes(), ETag=f'"{COMMIT}"')

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


@pytest.fixture(scope="module")
def parts(fabric):
    quick = cps.Training(1, batch_size=16)
    learner = cps.Learner(cps.Architecture("small"), rounds=1, train=quick, retrain=quick, fabric=fabric)
    learner.learn(make_task(0, shape=(3, 8, 8)))
    return learner


def test_a_folder_for_the_hub_has_the_model_and_its_card(parts, tmp_path):
    cps.save_for_hub(parts, tmp_path / "parts")
    card = (tmp_path / "parts" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: cps\npipeline_tag: image-classification\n")
    assert "## What it knows" in card
    assert same_model(cps.load_from_hub(tmp_path / "parts"), parts)


def test_the_card_has_valid_metadata(parts, tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    cps.save_for_hub(parts, tmp_path / "parts")
    card = hub.ModelCard.load(tmp_path / "parts" / "README.md")
    assert card.data.library_name == "cps"
    assert card.data.tags == ["continual-learning", "class-incremental-learning"]
    assert card.text.strip().startswith("# parts")


def test_a_model_is_pushed_to_a_hub_and_loaded_from_it(parts, tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    (tmp_path / "hub").mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with local_hub(tmp_path / "hub") as address:
        api = hub.HfApi(endpoint=address, token=False)
        assert cps.push_to_hub(parts, "me/parts", api=api).endswith(COMMIT)
        assert {path.name for path in (tmp_path / "hub").iterdir()} == {"model.cps", "README.md"}
        assert "\n# parts\n" in (tmp_path / "hub" / "README.md").read_text()
        assert same_model(cps.load_from_hub("me/parts", api=api), parts)


def test_a_backbone_of_yours_is_given_as_for_cps_load(make_learner, tmp_path):
    learner = make_learner()
    learner.learn(make_task(0))
    cps.save_for_hub(learner, tmp_path)
    with pytest.raises(cps.BackboneMissing):
        cps.load_from_hub(tmp_path)
    assert same_model(cps.load_from_hub(tmp_path, conv_net()), learner)


def test_without_huggingface_hub_the_error_says_how_to_install_it(parts, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(RuntimeError, match=r"needs huggingface_hub.*\[hub\]"):
        cps.push_to_hub(parts, "me/parts")


def test_a_path_that_is_neither_a_folder_nor_a_repository_raises(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"neither a folder with model.cps nor a repository such as 'user/name'"
    ):
        cps.load_from_hub(tmp_path / "nowhere")
