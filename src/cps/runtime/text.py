"""Format numbers, sizes, durations, names and errors for messages."""

from collections.abc import Sequence


def format_count(count: int, noun: str) -> str:
    """Return a count with its noun, as in "1 image" or "1,200 images"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_bytes(number: int) -> str:
    """Return a number of bytes in MiB or GiB."""
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{max(1, number // 2**20)} MiB"


def format_duration(seconds: float) -> str:
    """Return a rough duration in seconds, minutes or hours."""
    if seconds < 90:
        return f"{max(1.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def join_names(names: Sequence[object], *, limit: int = 8) -> str:
    """Return names separated by commas: the first `limit`, then how many more there are."""
    first = ", ".join(str(name) for name in names[:limit])
    return first + (f" and {len(names) - limit} more" if len(names) > limit else "")


def quote_names(names: Sequence[object], *, limit: int = 20) -> str:
    """Return names in quotes, separated by commas, cut after `limit`."""
    return ", ".join(f"'{name}'" for name in names[:limit]) + (", ..." if len(names) > limit else "")


def shorten_names(names: Sequence[object], *, limit: int = 6) -> str:
    """Return the repr of a tuple of names, cut after `limit`."""
    return f"({', '.join(repr(name) for name in names[:limit])}{', ...' if len(names) > limit else ''})"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if the message is empty."""
    return (str(error).splitlines() or [type(error).__name__])[0]
