"""The web page and the API documentation, as served and in a real browser."""

import base64
import hashlib
import re
from importlib.resources import files

import httpx
import pytest
import torch
from browser import CHROMIUM, browser
from PIL import Image
from served import SIZE, image_file, learn_two_tasks, serve

import cps

XSS = "<img src=x onerror=alert(1)>.png"
PREDICTED = "document.getElementById('status').textContent.includes('images predicted')"
DROP = """{
  const data = new DataTransfer();
  data.items.add(new File(["this is no image"], "dropped.png"));
  document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
}"""
TEXTS = "[...document.querySelectorAll('{}')].map((element) => element.textContent)"
CONTRASTS = """(() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const luminance = (rgb) => rgb.slice(0, 3).map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const background = (element) => {
    const colour = parse(getComputedStyle(element).backgroundColor);
    return colour.length === 4 && colour[3] === 0 && element.parentElement ? background(element.parentElement) : colour;
  };
  return [...document.querySelectorAll('body *')].filter((element) => element.offsetWidth > 1 &&
      [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim())).map((element) => {
    const [high, low] = [luminance(parse(getComputedStyle(element).color)), luminance(background(element))].sort((a, b) => b - a);
    return (high + 0.05) / (low + 0.05);
  });
})()"""

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


@pytest.fixture(scope="module")
def uploads(tmp_path_factory):
    """Return files to upload: one of each class of the first task, one with a hostile name, and one that is no image."""
    folder = tmp_path_factory.mktemp("uploads")
    (folder / "cat.png").write_bytes(image_file(0))
    (folder / XSS).write_bytes(image_file(1))
    (folder / "notes.png").write_text("this is no image")
    return [folder / name for name in ("cat.png", XSS, "notes.png")]


@pytest.mark.parametrize(("path", "file"), [("/", "page.html"), ("/docs", "docs.html")])
def test_a_page_is_self_contained_and_its_content_security_policy_allows_nothing_else(address, path, file):
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


@needs_chromium
@pytest.mark.slow
def test_images_uploaded_in_a_browser_show_their_class(address, uploads, tmp_path):
    with browser(tmp_path / "profile") as tab:
        tab.open(address)
        tab.wait("document.querySelectorAll('#tasks > li').length === 2")
        assert "free for new tasks" in tab.run("document.getElementById('free').textContent")
        tab.wait("document.getElementById('confusion').naturalWidth > 100")
        assert tab.run(TEXTS.format("#confused li")) == ["7 and cat: 1 image"]
        tab.upload("#files", *uploads)
        tab.wait(PREDICTED)
        assert tab.run(TEXTS.format(".class")) == ["cat", "<b>dog</b>"]
        assert tab.run(TEXTS.format(".error:not([hidden])")) == [
            "'notes.png' is not an image in a supported format: send JPEG, PNG, WebP, GIF, BMP, TIFF or PPM."
        ]
        assert tab.run(TEXTS.format(".result .file")) == ["cat.png", XSS, "notes.png"]
        assert tab.run("document.querySelectorAll('.result .selected').length") == 2
        assert tab.run("document.querySelectorAll('b:not(.tasks b), [onerror]').length") == 0  # names stay text
        widths = tab.run(
            "[...document.querySelectorAll('.selected .fill')].map((fill) => parseFloat(fill.style.width))"
        )
        assert min(widths) > 50
        tab.run("document.getElementById('group').click()")
        tab.upload("#files", *uploads[:2])
        tab.wait(f"{PREDICTED} && document.querySelectorAll('.class').length === 2")
        tab.upload("#files", *uploads[::-1])  # an unreadable image of a group does not affect the others
        tab.wait(f"{PREDICTED} && document.querySelectorAll('.class').length === 2")
        assert tab.run(TEXTS.format(".result.failed .file")) == ["notes.png"]
        assert tab.run(TEXTS.format(".result:not(.failed) .file")) == [XSS, "cat.png"]
        (tmp_path / "page.png").write_bytes(tab.screenshot())
        tab.run(DROP)
        tab.wait("document.querySelector('.result .error')?.textContent.startsWith(\"'dropped.png' is not an image\")")
        logged = [message["entry"]["text"] for message in tab.messages if "entry" in message]
        assert all("415" in text for text in logged), logged  # no violation of the policy, no script error
        assert len(tab.messages) == len(logged)
    with Image.open(tmp_path / "page.png") as screenshot:
        assert screenshot.size[0] == 1200
        assert len(screenshot.convert("RGB").getcolors(2**24)) > 50


@needs_chromium
@pytest.mark.slow
def test_the_page_shows_a_confidence_unless_the_task_has_one_class_only(tmp_path):
    learner, name = learn_two_tasks(), "a class name that is longer than any column that was made for it"
    learner.configure(rotations=cps.Rotations())
    learner.learn(cps.Task([name], train=(torch.rand(8, 3, SIZE, SIZE), [name] * 8)))
    learner.save(tmp_path / "model.cps")
    (tmp_path / "cat.png").write_bytes(image_file(0))
    with serve(tmp_path / "model.cps") as address, browser(tmp_path / "profile") as tab:
        tab.open(address, width=700)
        tab.wait("document.querySelectorAll('#tasks > li').length === 3")
        assert "Cascade" not in tab.run("document.body.innerText")
        assert tab.run("document.getElementById('facts').lastChild.title") == "Selector: Fusion"
        tab.upload("#files", tmp_path / "cat.png")
        tab.wait(PREDICTED)
        rows = tab.run(TEXTS.format(".prediction"))
        assert re.fullmatch(r"Task 1: cat \(>?\d+%\)", rows[0])
        assert rows[2] == f"Task 3: {name} (only class)"
        assert "softmax of the task scores" in tab.run("document.getElementById('legend').innerText")
        fits = "(element) => element.scrollWidth <= element.clientWidth"
        assert tab.run(f"[...document.querySelectorAll('.prediction')].every({fits})")


@needs_chromium
@pytest.mark.slow
def test_the_documentation_page_has_everything_in_the_openapi_document(address, tmp_path):
    api = httpx.get(f"{address}/openapi.json").json()
    with browser(tmp_path / "profile") as tab:
        tab.open(f"{address}/docs", width=360, height=800)
        tab.wait(f"document.querySelectorAll('section').length === {len(api['paths'])}")
        assert tab.run("document.documentElement.scrollWidth") <= 360
        assert tab.run(TEXTS.format("h2")) == ["POST/predict", "GET/model", "GET/health"]
        text, codes = tab.run("document.body.textContent"), tab.run(TEXTS.format("td code"))
        assert tab.messages == []
    assert f"curl -F images=@1.jpg -F images=@2.jpg -F group=true {address}/predict" in text
    fields = {code.replace("[]", "").split(".")[-1] for code in codes}
    for name, schema in api["components"]["schemas"].items():
        if name not in ("ErrorReply", "UnreadableReply"):  # the page describes these in a sentence
            assert set(schema["properties"]) <= fields
            assert all(field.get("description", "") in text for field in schema["properties"].values())
    for status, reply in api["paths"]["/predict"]["post"]["responses"].items():
        assert status in codes
        assert status == "200" or reply["description"] in text


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_fits_a_phone_and_has_enough_contrast_in_light_and_dark(address, uploads, tmp_path, dark):
    with browser(tmp_path / "profile") as tab:
        tab.open(address, width=360, height=800, dark=dark)
        tab.wait("document.querySelectorAll('#tasks > li').length === 2")
        tab.upload("#files", *uploads)
        tab.wait(PREDICTED)
        assert tab.run("document.documentElement.scrollWidth") <= 360
        contrasts = tab.run(CONTRASTS)
        assert len(contrasts) > 20
        assert min(contrasts) >= 4.5  # the minimum of WCAG for text
