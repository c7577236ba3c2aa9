"""How often images of each class are recognised, and which classes are confused: counts of held-out images.

The counts are notes of the tasks in a model file. Each image was predicted once, when its folder was learned, with the
task selected among all that there were then.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

from cps.app.task_metadata import CONFUSION
from cps.data.examples import ClassName

SIDE = 640  # pixels of the picture of the matrix, about
MOST_NAMED = 60  # classes whose names are written beside the matrix


class ClassAccuracy(NamedTuple):
    """How many of the held-out images of a class were recognised."""

    name: str
    right: int
    held_out: int


class ConfusedPair(NamedTuple):
    """Two classes, and how many held-out images of either were taken for the other."""

    one: str
    other: str
    images: int


@dataclass(frozen=True)
class Confusion:
    """Counts of held-out images by their class and the predicted one; `names` are all classes in order of learning."""

    names: tuple[str, ...]
    counts: Mapping[tuple[str, str], int]

    @property
    def classes(self) -> list[ClassAccuracy]:
        """The accuracy of each class, in order; a class without held-out images has zero of zero."""
        totals: Counter[str] = Counter()
        for (true, _), count in self.counts.items():
            totals[true] += count
        return [ClassAccuracy(name, self.counts.get((name, name), 0), totals[name]) for name in self.names]

    @property
    def pairs(self) -> list[ConfusedPair]:
        """Pairs of classes that were confused, those most often confused first."""
        totals: Counter[tuple[str, str]] = Counter()
        for (true, predicted), count in self.counts.items():
            if true != predicted:
                one, other = sorted((true, predicted))
                totals[one, other] += count
        return [ConfusedPair(one, other, count) for (one, other), count in sorted(totals.items(), key=_largest_first)]

    def picture(self) -> str:
        """Return the matrix as an SVG picture: rows are the true classes, columns the predicted ones."""
        number = max(1, len(self.names))
        side = max(3, SIDE // number)
        names = self.names if number <= MOST_NAMED else ()
        edge = 10 + 6 * min(28, max(map(len, names), default=0))
        total = {each.name: max(1, each.held_out) for each in self.classes}
        index = {name: position for position, name in enumerate(self.names)}
        cells = [
            f'<rect x="{edge + side * index[predicted]}" y="{edge + side * index[true]}" width="{side}" '
            f'height="{side}" fill="{"#0b5cad" if true == predicted else "#b8322f"}" '
            f'fill-opacity="{count / total[true]:.3f}"><title>{escape(true)} taken for {escape(predicted)}: {count} of '
            f"{total[true]}</title></rect>"
            for (true, predicted), count in self.counts.items()
            if true in index and predicted in index
        ]
        texts = []
        for name, position in ((name, index[name]) for name in names):
            short, middle = escape(name if len(name) <= 28 else name[:27] + "…"), edge + side * position + side / 2
            texts.append(f'<text x="{edge - 4}" y="{middle:g}" text-anchor="end" dy=".35em">{short}</text>')
            texts.append(f'<text transform="translate({middle:g} {edge - 4}) rotate(-90)" dy=".35em">{short}</text>')
        end = edge + side * number
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {end + 1} {end + 1}" width="{end + 1}" '
                f'height="{end + 1}" font-family="sans-serif" font-size="{min(11, max(6, side)):g}">',
                "<title>Confusion matrix of held-out images: rows are true classes, columns predictions</title>",
                f'<rect width="{end + 1}" height="{end + 1}" fill="white"/>',
                f'<rect x="{edge}" y="{edge}" width="{end - edge}" height="{end - edge}" fill="none" stroke="#999"/>',
                *cells,
                *texts,
                "</svg>\n",
            ]
        )


def read_confusion(tasks: Iterable[tuple[Sequence[ClassName], Mapping[str, Any]]]) -> Confusion:
    """Return the counts in the notes of tasks, given as pairs (classes, notes); notes of another form are ignored."""
    names: dict[str, None] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for classes, notes in tasks:
        names |= dict.fromkeys(map(str, classes))
        noted = notes.get(CONFUSION)
        for true, row in noted.items() if isinstance(noted, dict) else ():
            for predicted, count in row.items() if isinstance(row, dict) else ():
                if type(count) is int and count > 0:
                    counts[true, predicted] += count
    known = {pair: count for pair, count in counts.items() if pair[0] in names and pair[1] in names}
    return Confusion(tuple(names), known)


def counted(noted: Any, true: Sequence[ClassName], predicted: Sequence[ClassName | None]) -> dict[str, dict[str, int]]:
    """Return the note of a task with the counts of more held-out images."""
    counts = {name: dict(row) for name, row in noted.items()} if isinstance(noted, dict) else {}
    for name, found in zip(true, predicted, strict=True):
        row = counts.setdefault(str(name), {})
        row[str(found)] = row.get(str(found), 0) + 1
    return counts


def _largest_first(item: tuple[tuple[str, str], int]) -> tuple[int, tuple[str, str]]:
    return -item[1], item[0]
