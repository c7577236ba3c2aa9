"""Run one method on a sequence of tasks: learn, measure after each task, and resume after an interruption."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from cps.data.tasks import Task
from cps.evaluation.method_evaluation import AccuracyRow, evaluate_rows
from cps.method import Method
from cps.methods.joint import Joint
from cps.selection.base import Selector
from cps.storage.atomic import remove, write_json
from cps.storage.json_codec import from_json, to_json


class EpochProgress(Protocol):
    """The state of learning a task after an epoch."""

    @property
    def task(self) -> int:
        """The index of the task."""
        ...

    @property
    def phase_name(self) -> str:
        """The name of this phase of its training."""
        ...

    @property
    def epoch(self) -> int:
        """The number of finished epochs of the phase."""
        ...

    @property
    def epochs(self) -> int:
        """The number of epochs of the phase."""
        ...

    @property
    def loss(self) -> float:
        """The mean loss of the epoch."""
        ...


@dataclass
class Measured:
    """What a run has measured so far: the rows after each task, and what learning has cost.

    `kept` are the bytes that the method keeps after the last task, and `kept_while_learning` those while it learns.
    """

    identity: dict[str, Any]
    rows: tuple[AccuracyRow, ...] = ()
    seconds: float = 0.0
    image_passes: int = 0
    kept: dict[str, int] = field(default_factory=dict)
    kept_while_learning: dict[str, int] = field(default_factory=dict)
    is_complete: bool = False


@dataclass(frozen=True)
class MethodRun:
    """One method on a sequence of tasks, in a folder from which an interrupted run resumes.

    `make` returns the method before the first task, and `load` the one that a file holds. `identity` is what a run must
    have in common with one that it resumes, as JSON data. All methods are measured after each task, but for those whose
    outputs never change, and joint training: once, after the last.
    """

    make: Callable[[], Method]
    load: Callable[[Path], Method]
    folder: Path
    identity: Mapping[str, Any]
    selectors: Sequence[Selector]
    group_sizes: Sequence[int]
    seed: int = 0
    on_epoch: Callable[[EpochProgress], None] | None = None

    def start(self, tasks: Sequence[Task]) -> Measured:
        """Learn and measure all tasks, or those that an interrupted run has left."""
        measured = self._read()
        if measured.is_complete:
            return measured
        method = self.load(self._state) if self._state.exists() else self.make()
        steps = [list(tasks)] if isinstance(method, Joint) else [[task] for task in tasks]
        learned = len(method.classes) if len(steps) == len(tasks) else int(bool(method.classes))
        for step in range(learned, len(steps)):
            self._measure(method, tasks, measured, step)
            self._learn(method, steps[step], measured)
        self._measure(method, tasks, measured, len(steps), is_last=True)
        measured.kept = dict(method.kept())
        measured.kept_while_learning = dict(method.kept(learning=True))
        measured.is_complete = True
        self._write(measured)
        for path in (self._state, self._checkpoint):
            remove(path)
        return measured

    def _learn(self, method: Method, tasks: Sequence[Task], measured: Measured) -> None:
        """Learn a task, or all of them with joint training, and save the method."""
        start, passes = time.monotonic(), method.image_passes
        try:
            if isinstance(method, Joint):
                method.learn_all(tasks, checkpoint=self._checkpoint, on_epoch=self.on_epoch)
            else:
                method.learn(tasks[0], checkpoint=self._checkpoint, on_epoch=self.on_epoch)
            method.save(self._state)
            measured.image_passes += method.image_passes - passes
        finally:  # count the time of interrupted calls, too
            measured.seconds += time.monotonic() - start
            self._write(measured)

    def _measure(
        self, method: Method, tasks: Sequence[Task], measured: Measured, steps: int, *, is_last: bool = False
    ) -> None:
        """Add the rows that are missing after a number of steps."""
        if len(measured.rows) < steps and (is_last or not method.is_sealed):
            rows = evaluate_rows(method, tasks, selectors=self.selectors, group_sizes=self.group_sizes, seed=self.seed)
            measured.rows = (*measured.rows, *rows)
            self._write(measured)

    @property
    def _state(self) -> Path:
        return self.folder / "state"

    @property
    def _checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    def _read(self) -> Measured:
        """Return what an earlier run has measured; raise `ValueError` if it was another run."""
        path = self.folder / "run.json"
        identity = to_json(dict(self.identity))
        if not path.exists():
            return Measured(identity)
        found = from_json(Measured, json.loads(path.read_text()))
        differing = [name for name in identity if found.identity.get(name) != identity[name]]
        if differing:
            raise ValueError(
                f"'{self.folder}' holds another run (it differs in: {', '.join(differing)}); choose another --out or "
                "delete it"
            )
        return found

    def _write(self, measured: Measured) -> None:
        write_json(self.folder / "run.json", to_json(measured))
