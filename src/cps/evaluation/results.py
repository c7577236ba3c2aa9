"""The results of `evaluate`: accuracy matrices and metrics, in percent."""

from dataclasses import dataclass
from typing import Any

from cps.evaluation.metrics import Matrix, average_accuracy, average_incremental_accuracy, backward_transfer
from cps.storage.json_codec import to_json


@dataclass(frozen=True, eq=False)
class Metrics:
    """An accuracy matrix and the metrics computed from it, in percent.

    `accuracy[after, on]` is the accuracy on task `on` after task `after` was learned; NaN above the diagonal. `top5` is
    None unless every task has more than five classes. `selection` has the same shape as `accuracy` and is the share of
    images whose task was found; None if the task was given.
    """

    ACC: float
    BWT: float
    AIA: float
    accuracy: Matrix
    top5: float | None = None
    selection: Matrix | None = None

    @classmethod
    def of(cls, accuracy: Matrix, *, top5: float | None = None, selection: Matrix | None = None) -> "Metrics":
        """Compute the metrics of an accuracy matrix."""
        return cls(
            ACC=average_accuracy(accuracy),
            BWT=backward_transfer(accuracy),
            AIA=average_incremental_accuracy(accuracy),
            accuracy=accuracy,
            top5=top5,
            selection=selection,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Metrics) and to_json(self) == to_json(other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` measured: metrics with the task given, and by selector name and group size with the task found.

    `evaluation.class_il["Cascade"][1].ACC` is the accuracy of the cascade on single images after the last task.
    """

    task_il: Metrics
    class_il: dict[str, dict[int, Metrics]]

    def encode(self) -> dict[str, Any]:
        """Return the evaluation as JSON data, as results.json holds it."""
        return to_json(self)
