"""Pages that describe code are compared with it."""

import dataclasses
import importlib.util
import inspect
import re
from pathlib import Path

import cps
from cps.config import LearnerConfig

ROOT = Path(__file__).parents[2]


def defaults_of(function):
    parameters = list(inspect.signature(function).parameters.values())
    return {each.name: each.default for each in parameters if each.name not in ("self", "backbone")}


def documented(section):
    page = (ROOT / "docs" / "settings.md").read_text().split(f"## `cps.{section}(")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| `?(.*?)`? \|", page, re.M))


def test_every_setting_of_the_learner_is_documented_with_its_default():
    defaults = defaults_of(cps.Learner.__init__)
    assert documented("Learner") == {name: repr(default) for name, default in defaults.items()}


def test_every_setting_of_training_is_documented_with_its_default():
    training = cps.Training(1)
    expected = {field.name: repr(getattr(training, field.name)) for field in dataclasses.fields(training)}
    assert documented("Training") == {**expected, "epochs": "required"}


def test_defaults_of_the_learner_are_those_of_its_config():
    defaults = defaults_of(cps.Learner.__init__)
    for field in dataclasses.fields(LearnerConfig):
        assert defaults[field.name] == field.default


def test_the_picture_of_the_rooms_shows_the_contract_and_the_imports():
    path = ROOT / "docs" / "rooms.py"
    spec = importlib.util.spec_from_file_location("rooms", path)
    rooms = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rooms)
    assert rooms.PICTURE.read_text() == rooms.draw(), "run python docs/rooms.py"
    folders = {each.name for each in (ROOT / "src" / "cps").iterdir() if each.is_dir() and each.name[0] != "_"}
    assert folders <= {room for row in rooms.contract() for room in row}


def test_the_citation_names_this_version():
    assert f"\nversion: {cps.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_readme_is_short_and_shows_the_rooms():
    readme = (ROOT / "README.md").read_text()
    assert readme.count("\n") <= 160
    table = readme.split("| room")[1].split("\n\n")[0]
    assert table.count("\n") - 1 <= 16
