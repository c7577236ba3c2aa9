"""Numbers in settings are checked by type, and become Python numbers that files can hold."""

import dataclasses
import math

import numpy as np
import pytest

import cps
from cps.network.architectures import Architecture

REQUIRED = {
    "Steps": {"at": (1,)},
    "Training": {"epochs": 1},
    "Architecture": {"name": "small"},
}  # fields without defaults
NUMBERS = [
    (kind, field.name, field.type)
    for kind in (
        cps.SGD, cps.Adam, cps.Steps, cps.Cosine, cps.Training, cps.Contrastive, cps.PadCrop, cps.Rotate, cps.Colour,
        cps.Capacity, cps.Upright, cps.Rotations, cps.ImportanceSignature, cps.Cascade, cps.Magnitude, cps.NNrelief,
        Architecture,
    )
    for field in dataclasses.fields(kind)
    if field.type in (int, float, bool)
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "of"), NUMBERS)
def test_every_number_in_a_setting_is_checked_by_its_type(kind, name, of):
    def make(value):
        return getattr(kind(**{**REQUIRED.get(kind.__name__, {}), name: value}), name)

    wrong = ["1", None, [1], math.nan, math.inf, 10**400, 2 if of is bool else True, *([2.5] if of is int else [])]
    for value in wrong:
        with pytest.raises(ValueError, match=f"{name} of {kind.__name__} must be"):
            make(value)
    for value in (1, np.bool_(True)) if of is bool else (of(1), np.float32(1.0)):  # files hold Python numbers only
        assert make(value) == 1
        assert type(make(value)) is of


@pytest.mark.parametrize("wrong", [5, "ab", (1, "x"), (1, math.nan), (True, 1), (1,), None])
def test_sequences_of_numbers_are_checked(wrong):
    for make, name in (
        (lambda row: cps.ResizedCrop(area=row), "area of ResizedCrop"),
        (lambda row: cps.Normalize(row, (1.0, 1.0)), "mean of Normalize|as many means"),
        (lambda row: cps.Steps(row if row != (1,) else 1), "at of Steps"),
    ):
        with pytest.raises(ValueError, match=name):
            make(wrong)
    assert cps.Normalize(np.array([0.5, 0.25]), [1, 2]) == cps.Normalize((0.5, 0.25), (1, 2))


def test_a_setting_must_be_a_dataclass():
    with pytest.raises(TypeError, match="needs a dataclass"):
        cps.setting(type("Mine", (), {}))


def test_numbers_out_of_range_raise():
    with pytest.raises(ValueError, match="0 or more, got -1"):
        cps.PadCrop(-1)
    with pytest.raises(ValueError, match="deviation must be non-zero"):
        cps.Normalize((0.5,), (0.0,))
