"""A precision that cannot be used raises."""

import pytest

import cps


@pytest.mark.parametrize(
    ("precision", "message"),
    [("bf16-true", "bf16-true"), ("64-true", r"unsupported precision '64-true'; choose from: 32-true")],
)
def test_an_unsupported_precision_raises(precision, message):
    with pytest.raises(ValueError, match=message):
        cps.make_fabric(accelerator="cpu", precision=precision)
