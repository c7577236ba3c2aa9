"""The server as outsiders meet it: a browser, a fuzzer of its OpenAPI document, slow connections, a terminal."""

import base64
import hashlib
import re
import signal
import socket
import subprocess
import sys
from importlib.resources import files

import httpx
import pytest
import torch
from browser import CHROMIUM, browser
from fuzz.server import ask
from PIL import Image
from served import SIZE, eventually, learned, picture, post, serving_at
from typer.testing import CliRunner

import cps
from cps.cli import app
from cps.serve.middleware import Limits

XSS = "<img src=x onerror=alert(1)>.png"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("served") / "model.cps"
    learned().save(path)
    return path


@pytest.fixture(scope="module")
def address(model):
    with serving_at(model) as address:
        yield address


@pytest.fixture(scope="module")
def uploads(tmp_path_factory):
    """Return files to choose: one of each class of the first task, with a hostile name, and one that is no image."""
    folder = tmp_path_factory.mktemp("uploads")
    (folder / "cat.png").write_bytes(picture(0))
    (folder / XSS).write_bytes(picture(1))
    (folder / "notes.png").write_text("this is no image")
    return [folder / name for name in ("cat.png", XSS, "notes.png")]


@pytest.mark.parametrize(("path", "file"), [("/", "page.html"), ("/docs", "docs.html")])
def test_a_page_stands_alone_and_its_policy_allows_nothing_else(address, path, file):
    reply = httpx.get(f"{address}{path}")
    page = (files("cps.serve") / "static" / file).read_text()
    assert reply.text == page
    assert not re.search(r"https?://", page)
    assert "innerHTML" not in page
    policy = reply.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        inside = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.S)
        assert len(inside) == 1
        assert base64.b64encode(hashlib.sha256(inside[0].encode()).digest()).decode() in policy
    assert reply.headers["x-content-type-options"] == "nosniff"


ANSWERED = "document.getElementById('status').textContent.includes('have an answer')"
DROP = """{
  const carried = new DataTransfer();
  carried.items.add(new File(["this is no image"], "dropped.png"));
  document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: carried, bubbles: true, cancelable: true }));
}"""
TEXTS = "[...document.querySelectorAll('{}')].map((one) => one.textContent)"


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_person_uploads_images_in_a_browser_and_sees_what_they_are(address, uploads, tmp_path):
    with browser(tmp_path / "profile") as tab:
        tab.open(address)
        tab.wait("document.querySelectorAll('#tasks > li').length === 2")
        assert "free for new tasks" in tab.run("document.getElementById('free').textContent")
        tab.upload("#files", *uploads)
        tab.wait(ANSWERED)
        assert tab.run(TEXTS.format(".class")) == ["cat", "<b>dog</b>"]
        assert tab.run(TEXTS.format(".error:not([hidden])")) == [
            "'notes.png' is not an image that can be read; send JPEG, PNG, WebP, GIF, BMP, TIFF or PPM"
        ]
        assert tab.run(TEXTS.format(".result .file")) == ["cat.png", XSS, "notes.png"]
        assert tab.run("document.querySelectorAll('.result .chosen').length") == 2
        assert tab.run("document.querySelectorAll('b:not(.tasks b), [onerror]').length") == 0  # names stay text
        widths = tab.run("[...document.querySelectorAll('.chosen .fill')].map((fill) => parseFloat(fill.style.width))")
        assert min(widths) > 50
        tab.run("document.getElementById('group').click()")
        tab.upload("#files", *uploads[:2])
        tab.wait(f"{ANSWERED} && document.querySelectorAll('.class').length === 2")
        tab.upload("#files", *uploads[::-1])  # of a group, only what cannot be read has no answer
        tab.wait(f"{ANSWERED} && document.querySelectorAll('.class').length === 2")
        assert tab.run(TEXTS.format(".result.failed .file")) == ["notes.png"]
        assert tab.run(TEXTS.format(".result:not(.failed) .file")) == [XSS, "cat.png"]
        (tmp_path / "page.png").write_bytes(tab.picture())
        tab.run(DROP)
        tab.wait("document.querySelector('.result .error')?.textContent.startsWith(\"'dropped.png' is not an image\")")
        complaints = [said["entry"]["text"] for said in tab.said if "entry" in said]
        assert all("415" in text for text in complaints), complaints  # no breach of the page's policy, no script error
        assert len(tab.said) == len(complaints)
    with Image.open(tmp_path / "page.png") as shot:
        assert shot.size[0] == 1200
        assert len(shot.convert("RGB").getcolors(2**24)) > 50


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_says_how_sure_a_subnetwork_is_unless_it_knows_one_class_only(tmp_path):
    learner, name = learned(), "a class name that is longer than any column that was made for it"
    learner.rotations = cps.Rotations()
    learner.learn(cps.Task([name], train=(torch.rand(8, 3, SIZE, SIZE), [name] * 8)))
    learner.save(tmp_path / "model.cps")
    (tmp_path / "cat.png").write_bytes(picture(0))
    with serving_at(tmp_path / "model.cps") as address, browser(tmp_path / "profile") as tab:
        tab.open(address, width=700)
        tab.wait("document.querySelectorAll('#tasks > li').length === 3")
        assert "Cascade" not in tab.run("document.body.innerText")
        assert tab.run("document.getElementById('facts').lastChild.title") == "The selector: Cascade"
        tab.upload("#files", tmp_path / "cat.png")
        tab.wait(ANSWERED)
        rows = tab.run(TEXTS.format(".who"))
        assert re.fullmatch(r"Task 1: cat, (over )?\d+% sure", rows[0])
        assert rows[2] == f"Task 3: {name}, its only class"
        assert "share of the selector's vote" in tab.run("document.getElementById('legend').innerText")
        assert tab.run("[...document.querySelectorAll('.who')].every((who) => who.scrollWidth <= who.clientWidth)")


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_about_the_paths_tells_all_that_the_openapi_document_does(address, tmp_path):
    described = httpx.get(f"{address}/openapi.json").json()
    with browser(tmp_path / "profile") as tab:
        tab.open(f"{address}/docs", width=360, height=800)
        tab.wait(f"document.querySelectorAll('section').length === {len(described['paths'])}")
        assert tab.run("document.documentElement.scrollWidth") <= 360
        assert tab.run(TEXTS.format("h2")) == ["POST/predict", "GET/model", "GET/health"]
        text, codes = tab.run("document.body.textContent"), tab.run(TEXTS.format("td code"))
        assert tab.said == []
    assert f"curl -F images=@1.jpg -F images=@2.jpg -F group=true {address}/predict" in text
    fields = {code.replace("[]", "").split(".")[-1] for code in codes}
    for name, schema in described["components"]["schemas"].items():
        if name not in ("ErrorReply", "UnreadReply"):  # which the page says in a sentence
            assert set(schema["properties"]) <= fields
            assert all(field.get("description", "") in text for field in schema["properties"].values())
    for status, reply in described["paths"]["/predict"]["post"]["responses"].items():
        assert status in codes
        assert status == "200" or reply["description"] in text


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_fits_a_phone_and_its_text_stands_out_in_light_and_dark(address, uploads, tmp_path, dark):
    with browser(tmp_path / "profile") as tab:
        tab.open(address, width=360, height=800, dark=dark)
        tab.wait("document.querySelectorAll('#tasks > li').length === 2")
        tab.upload("#files", *uploads)
        tab.wait(ANSWERED)
        assert tab.run("document.documentElement.scrollWidth") <= 360
        contrasts = tab.run(CONTRASTS)
        assert len(contrasts) > 20
        assert min(contrasts) >= 4.5  # what WCAG asks of text


CONTRASTS = """(() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => rgb.slice(0, 3).map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (one) => {
    const colour = parse(getComputedStyle(one).backgroundColor);
    return colour.length === 4 && colour[3] === 0 && one.parentElement ? behind(one.parentElement) : colour;
  };
  return [...document.querySelectorAll('body *')].filter((one) => one.offsetWidth > 1 &&
      [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim())).map((one) => {
    const [high, low] = [light(parse(getComputedStyle(one).color)), light(behind(one))].sort((a, b) => b - a);
    return (high + 0.05) / (low + 0.05);
  });
})()"""


def test_a_fuzzer_of_the_openapi_document_finds_no_server_error(address, tmp_path):
    made, passed, said = ask(address, "--max-examples", "20", "--generation-deterministic", folder=tmp_path)
    assert made == passed > 40, said[-3000:]


def half_a_request(address):
    """Return a connection that has sent a part of a request."""
    host, port = address.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    head = f"POST /predict HTTP/1.1\r\nHost: {host}\r\nContent-Type: multipart/form-data; boundary=x\r\nContent-Length: 4\r\n\r\n"
    connection.sendall(head.encode() + b"--")
    return connection


def test_more_requests_than_are_taken_at_once_are_told_to_come_back(model):
    with serving_at(model, Limits(at_once=2, seconds=20)) as address:
        waiting = [half_a_request(address) for _ in range(2)]
        eventually(address, lambda health: health["at_work"] == 2)
        reply = post(address, ("x.png", picture(0)))
        assert reply.status_code == 503
        assert reply.headers["retry-after"] == "1"
        assert "try again soon" in reply.json()["error"]
        for connection in waiting:
            connection.close()
        eventually(address, lambda health: health["at_work"] == 0)
        assert post(address, ("x.png", picture(0))).status_code == 200


def test_a_request_that_does_not_arrive_in_time_is_let_go(model):
    with serving_at(model, Limits(seconds=0.2)) as address, half_a_request(address) as connection:
        reply = connection.recv(4096)
        assert b" 408 " in reply.splitlines()[0]


def test_the_command_warns_where_others_can_reach_it_and_ends_at_ctrl_c(model):
    command = [sys.executable, "-m", "cps", "serve", str(model), "--host", "0.0.0.0", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            described = re.match(r"Serving model\.cps at http://0\.0\.0\.0:(\d+)", process.stdout.readline())
            assert eventually(f"http://127.0.0.1:{described[1]}", lambda health: True)["status"] == "ok"
            process.send_signal(signal.SIGINT)
            said, complained = process.communicate(timeout=30)
        finally:
            process.kill()
    assert "can be reached from other machines" in complained
    assert "no password and no encryption" in complained
    assert "Traceback" not in complained
    assert said == "Stopped.\n"
    assert process.returncode == 0


def test_an_address_that_is_taken_is_said_in_one_line(model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = CliRunner().invoke(app, ["serve", str(model), "--port", str(taken.getsockname()[1])])
    assert done.exit_code == 1
    assert "choose another with --port or --host" in done.output
    assert "warning" not in done.output


def test_a_model_that_is_not_there_is_said_in_one_line():
    done = CliRunner().invoke(app, ["serve", "nothing.cps"])
    assert done.exit_code == 1
    assert "there is no file 'nothing.cps'" in done.output
