"""Names of classes: one form for each, new versions of it, and names that are almost alike."""

import unicodedata
from collections.abc import Collection, Iterator, Sequence


def one_form(name: object) -> str:
    """Return a name in one form of Unicode, of several that look the same."""
    return unicodedata.normalize("NFC", str(name))


def new_version(name: str, known: Collection[str]) -> str:
    """Return the name of the next version of a known class."""
    number = 2
    while f"{name} ({number})" in known:
        number += 1
    return f"{name} ({number})"


def almost_alike(names: Sequence[str], known: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each name that differs by letter case or blanks alone from one before it, or a known one, and that."""
    for index, name in enumerate(names):
        for other in (*known, *names[:index]):
            if other != name and _bare(other) == _bare(name):
                yield name, other
                break


def _bare(name: str) -> str:
    return "".join(name.casefold().split())
