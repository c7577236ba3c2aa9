"""Which classes are confused: counts of images by their class and the predicted one.

They give the accuracy of each class, the pairs of classes that are most often confused, and a picture of the matrix.
"""

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

SIDE = 640  # pixels of the picture of the matrix, about
MOST_NAMED = 60  # classes whose names are written beside the matrix


class ClassAccuracy(NamedTuple):
    """How many of the images of a class were recognised."""

    name: str
    right: int
    images: int


class ConfusedPair(NamedTuple):
    """Two classes, and how many images of either were taken for the other."""

    one: str
    other: str
    images: int


@dataclass(frozen=True)
class Confusion:
    """Counts of images by their class and then the predicted one; `names` are all classes in order of learning."""

    names: tuple[str, ...]
    counts: dict[str, dict[str, int]]

    @classmethod
    def of(cls, names: Iterable[Hashable], true: Iterable[Hashable], predicted: Iterable[Hashable]) -> "Confusion":
        """Count images; classes that are no text are named by theirs."""
        counts: dict[str, dict[str, int]] = {}
        for name, found in zip(true, predicted, strict=True):
            row = counts.setdefault(str(name), {})
            row[str(found)] = row.get(str(found), 0) + 1
        return cls(tuple(map(str, names)), counts)

    @property
    def classes(self) -> list[ClassAccuracy]:
        """The accuracy of each class, in order; a class without images has zero of zero."""
        rows = [(name, self.counts.get(name, {})) for name in self.names]
        return [ClassAccuracy(name, row.get(name, 0), sum(row.values())) for name, row in rows]

    @property
    def pairs(self) -> list[ConfusedPair]:
        """Pairs of classes that were confused, those most often confused first."""
        totals: Counter[tuple[str, str]] = Counter()
        for true, row in self.counts.items():
            for predicted, count in row.items():
                if true != predicted:
                    one, other = sorted((true, predicted))
                    totals[one, other] += count
        most_first = sorted(totals.items(), key=lambda item: (-item[1], item[0]))
        return [ConfusedPair(one, other, count) for (one, other), count in most_first]

    def picture(self) -> str:
        """Return the matrix as an SVG picture: rows are the true classes, columns the predicted ones."""
        number = max(1, len(self.names))
        side = max(3, SIDE // number)
        names = self.names if number <= MOST_NAMED else ()
        edge = 10 + 6 * min(28, max(map(len, names), default=0))
        total = {each.name: max(1, each.images) for each in self.classes}
        index = {name: position for position, name in enumerate(self.names)}
        cells = [
            f'<rect x="{edge + side * index[predicted]}" y="{edge + side * index[true]}" width="{side}" '
            f'height="{side}" fill="{"#0b5cad" if true == predicted else "#b8322f"}" '
            f'fill-opacity="{count / total[true]:.3f}"><title>{escape(true)} taken for {escape(predicted)}: {count} of '
            f"{total[true]}</title></rect>"
            for true, row in self.counts.items()
            for predicted, count in row.items()
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
                "<title>Confusion matrix: rows are true classes, columns predictions</title>",
                f'<rect width="{end + 1}" height="{end + 1}" fill="white"/>',
                f'<rect x="{edge}" y="{edge}" width="{end - edge}" height="{end - edge}" fill="none" stroke="#999"/>',
                *cells,
                *texts,
                "</svg>\n",
            ]
        )
