"""How often images of each class are recognised, and which classes are confused: counts of held-out images.

The counts are notes of the tasks in a model file. Each image was predicted once, when its folder was learned, with the
task selected among all that there were then.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cps.app.task_metadata import CONFUSION
from cps.data.examples import ClassName
from cps.evaluation.confusion import Confusion


def read_confusion(tasks: Iterable[tuple[Sequence[ClassName], Mapping[str, Any]]]) -> Confusion:
    """Return the counts in the notes of tasks, given as pairs (classes, notes); notes of another form are ignored."""
    names: dict[str, None] = {}
    noted: list[dict[str, dict[str, int]]] = []
    for classes, notes in tasks:
        names |= dict.fromkeys(map(str, classes))
        noted.append(notes.get(CONFUSION, {}))
    counts: dict[str, dict[str, int]] = {}
    for rows in noted:
        for true, row in rows.items() if isinstance(rows, dict) else ():
            for predicted, count in row.items() if isinstance(row, dict) else ():
                if type(count) is int and count > 0 and true in names and predicted in names:
                    of_class = counts.setdefault(true, {})
                    of_class[predicted] = of_class.get(predicted, 0) + count
    return Confusion(tuple(names), counts)


def counted(noted: Any, true: Sequence[ClassName], predicted: Sequence[ClassName | None]) -> dict[str, dict[str, int]]:
    """Return the note of a task with the counts of more held-out images."""
    counts = {name: dict(row) for name, row in noted.items()} if isinstance(noted, dict) else {}
    for name, found in Confusion.of((), true, predicted).counts.items():
        row = counts.setdefault(name, {})
        for other, count in found.items():
            row[other] = row.get(other, 0) + count
    return counts
