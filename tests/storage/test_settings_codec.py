"""Settings round-trip through JSON; numbers are checked; files of older versions and unknown types still load."""

import json
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from cps.storage.settings_codec import (
    NumericSettings,
    Unknown,
    decode,
    encode,
    setting,
    stable_str,
    unknown_in,
    upgrade_settings,
)


@setting
@dataclass(frozen=True)
class Blur(NumericSettings):
    """A setting whose field was called `width` in older files."""

    RENAMED: ClassVar = {"width": "radius"}

    radius: int = 1
    range: tuple[float, float] = (0.0, 1.0)
    is_strong: bool = False

    def __post_init__(self):
        super().__post_init__()
        self._require("radius", self.radius > 0, must="positive")


@dataclass(frozen=True)
class Unregistered:
    number: int = 1


def test_settings_round_trip_through_json():
    value = (Blur(3, (0.5, 2.0), True), None, "text", 1.5, [Blur()])
    assert decode(json.loads(json.dumps(encode(value)))) == (*value[:4], (Blur(),))


def test_numpy_numbers_become_python_numbers():
    blur = Blur(np.int64(3), np.array([0.5, 2.0]), np.bool_(True))
    assert blur == Blur(3, (0.5, 2.0), True)
    assert [type(blur.radius), type(blur.range[0]), type(blur.is_strong)] == [int, float, bool]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"radius": 1.5}, "radius of Blur must be an integer, got 1.5"),
        ({"radius": True}, "radius of Blur must be an integer, got True"),
        ({"radius": 0}, "radius of Blur must be positive, got 0"),
        ({"range": (0.0,)}, r"range of Blur must be a tuple of 2 numbers, got \(0.0,\)"),
        ({"range": (0.0, float("nan"))}, "range of Blur must be a finite number, got nan"),
        ({"is_strong": 2}, "is_strong of Blur must be True or False, got 2"),
    ],
)
def test_wrong_numbers_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        Blur(**fields)


def test_field_names_of_older_files_are_read():
    assert decode({"type": "Blur", "width": 4}) == Blur(4)
    upgraded = upgrade_settings({"views": {"type": "Blur", "width": 4}})
    assert upgraded["rotations"] == {"type": "Blur", "radius": 4}
    assert "views" not in upgraded
    assert upgraded["trunk"] is None  # what a file without it stands for


def test_unregistered_objects_are_stored_as_their_repr_and_come_back_as_unknown():
    assert encode(Unregistered()) == {"type": None, "was": "Unregistered(number=1)"}
    assert decode(encode(Unregistered())) == Unknown("Unregistered(number=1)")
    assert decode({"type": "Blur", "radius": {"type": "NoSuchType"}}) == Unknown("NoSuchType")
    assert unknown_in((1, (Unknown("a"),), Unknown("b"))) == ["a", "b"]


def test_damaged_settings_raise():
    with pytest.raises(ValueError, match="damaged setting Blur: radius of Blur must be positive"):
        decode({"type": "Blur", "radius": -1})
    with pytest.raises(ValueError, match="damaged setting Blur: .*unexpected keyword"):
        decode({"type": "Blur", "colour": 1})


def test_a_setting_is_a_dataclass_with_a_unique_name():
    with pytest.raises(TypeError, match="needs a dataclass"):
        setting(type("Plain", (), {}))
    with pytest.raises(ValueError, match="a setting named Blur already exists"):
        setting(dataclass(frozen=True)(type("Blur", (), {"__module__": "elsewhere"})))


def test_text_of_a_setting_has_no_memory_address():
    assert stable_str(object()) == "<object object>"
