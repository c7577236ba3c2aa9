"""Words for numbers, sizes, times and lists of names."""

from collections.abc import Sequence


def listed(names: Sequence[object]) -> str:
    """Return names in a row, and of many how many more there are."""
    first = ", ".join(str(name) for name in names[:8])
    return first + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def number_of(count: int, what: str) -> str:
    """Return how many there are of something."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def size_text(number: int) -> str:
    """Return a number of bytes."""
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{max(1, number // 2**20)} MiB"


def duration(seconds: float) -> str:
    """Return how long something takes, roughly."""
    if seconds < 90:
        return f"{max(1.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
