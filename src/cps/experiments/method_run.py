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

WRITING_INTERVAL = 10.0  # seconds of learning after which run.json is written again


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
    def loss(self) -> float | None:
        """The mean loss of the epoch."""
        ...


@dataclass(frozen=True)
class MeasuringProgress:
    """The state before the method is measured on the test images of the tasks up to `task`."""

    task: int
    phase_name: str = "measuring"
    epoch: int = 0
    epochs: int = 1
    loss: float | None = None


@dataclass
class Measured:
    """What a run has measured so far: the rows after each task, and what learning has cost.

    `passes` are the image passes of each step of learning, by its index, and `kept` the bytes that the method keeps
    after the last task, `kept_while_learning` those while it learns. `seconds` are those of learning, in all calls.
    """

    identity: dict[str, Any]
    rows: tuple[AccuracyRow, ...] = ()
    seconds: float = 0.0
    passes: dict[int, int] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    kept_while_learning: dict[str, int] = field(default_factory=dict)
    is_complete: bool = False

    @property
    def image_passes(self) -> int:
        """The number of images in all training steps."""
        return sum(self.passes.values())


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
        measured = self.read()
        if measured.is_complete:
            return measured
        method = self.load(self._state) if self._state.exists() else self.make()
        steps = [list(tasks)] if isinstance(method, Joint) else [[task] for task in tasks]
        learned = len(method.classes) if len(steps) == len(tasks) else int(bool(method.classes))
        for step in range(learned, len(steps)):
            self._measure(method, tasks, measured, step)
            self._learn(method, steps[step], measured, step)
        self._measure(method, tasks, measured, len(steps), is_last=True)
        measured.kept = dict(method.kept())
        measured.kept_while_learning = dict(method.kept(learning=True))
        measured.is_complete = True
        self._write(measured)
        self._clean_up()
        return measured

    def read(self) -> Measured:
        """Return what an earlier run has measured so far; raise `ValueError` if the folder has another run."""
        identity = to_json(dict(self.identity))
        try:
            found = from_json(Measured, json.loads(self._record.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return Measured(identity)
        except ValueError as error:
            raise ValueError(f"'{self._record}' is damaged ({error}); delete the folder to start over") from None
        differing = [name for name in identity if found.identity.get(name) != identity[name]]
        if differing:
            raise ValueError(
                f"'{self.folder}' holds another run (it differs in: {', '.join(differing)}); choose another --out or "
                "delete it"
            )
        if found.is_complete:
            self._clean_up()  # the call that completed it may have been killed before it could
        return found

    def _learn(self, method: Method, tasks: Sequence[Task], measured: Measured, step: int) -> None:
        """Learn a task, or all of them with joint training, and save the method.

        The record is written before the method, so that a call that is killed between them learns the task again, from
        its last checkpoint, and counts it once.
        """
        start, before, passes = time.monotonic(), measured.seconds, method.image_passes
        written = start

        def after_epoch(at: EpochProgress) -> None:
            nonlocal written
            if time.monotonic() - written > WRITING_INTERVAL:
                written = time.monotonic()
                measured.seconds = before + written - start
                self._write(measured)
            if self.on_epoch is not None:
                self.on_epoch(at)

        try:
            if isinstance(method, Joint):
                method.learn_all(tasks, checkpoint=self._checkpoint, on_epoch=after_epoch)
            else:
                method.learn(tasks[0], checkpoint=self._checkpoint, on_epoch=after_epoch)
            measured.passes[step] = method.image_passes - passes
        finally:  # count the time of interrupted calls, too
            measured.seconds = before + time.monotonic() - start
            self._write(measured)
        method.save(self._state)

    def _measure(
        self, method: Method, tasks: Sequence[Task], measured: Measured, steps: int, *, is_last: bool = False
    ) -> None:
        """Add the rows that are missing after a number of steps."""
        if len(measured.rows) < steps and (is_last or not method.is_sealed):
            if self.on_epoch is not None:
                self.on_epoch(MeasuringProgress(len(method.classes) - 1))
            rows = evaluate_rows(method, tasks, selectors=self.selectors, group_sizes=self.group_sizes, seed=self.seed)
            measured.rows = (*measured.rows, *rows)
            self._write(measured)

    @property
    def _record(self) -> Path:
        return self.folder / "run.json"

    @property
    def _state(self) -> Path:
        return self.folder / "state"

    @property
    def _checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    def _clean_up(self) -> None:
        for path in (self._state, self._checkpoint):
            remove(path)

    def _write(self, measured: Measured) -> None:
        write_json(self._record, to_json(measured))
