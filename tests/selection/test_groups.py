"""Groups of images that share a task."""

import pytest

from samples import make_task


def test_a_group_size_below_one_raises(learned):
    with pytest.raises(ValueError, match="group_size"):
        learned.predict(make_task(0).test[0], group_size=0)
