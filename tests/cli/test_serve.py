"""`cps serve` checks its options."""

from commands import run_cps


def test_the_maximum_of_megapixels_cannot_exceed_what_is_ever_decoded():
    assert "40" in run_cps("serve", "x.cps", "--max-megapixels", 41, code=2).output
