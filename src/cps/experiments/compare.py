"""Compare methods on the tasks of a recipe: the same data, backbone, augmentation and budget for all.

The folder has a results.json, which is written after each method, and what an interrupted method resumes from. A method
that fails is left out, and the others run.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from cps.data.tasks import Scenario
from cps.evaluation.method_evaluation import evaluation_of
from cps.experiments.comparison import Comparison, Failure, MethodResult
from cps.experiments.contestants import CLOSED_FORM, Contestant, Setting, find_contestants
from cps.experiments.method_run import EpochProgress, Measured, MethodRun
from cps.learner import Learner
from cps.method import Method
from cps.methods.blocks.memory import Memory
from cps.runtime.devices import precision_of
from cps.runtime.environment import describe_device, versions
from cps.runtime.text import first_line
from cps.selection.base import Selector
from cps.storage.lock import locked
from cps.storage.settings_codec import encode, stable_str

Order = int | str | None


@dataclass(frozen=True)
class CompareProgress:
    """The state of a comparison after an epoch: which method on which order, and how far it is.

    `run` of `runs` are finished; `epoch` of `epochs` are finished in this phase of task `task` of `tasks`.
    """

    method: str
    order: Order
    run: int
    runs: int
    task: int
    tasks: int
    phase: str
    epoch: int
    epochs: int
    loss: float | None


@dataclass(frozen=True)
class Compare:
    """A comparison of methods on class orders, in a folder from which an interrupted one resumes.

    A closed form over fixed features is always among the methods. `data` is the folder of the data set, and `tasks`
    limits the comparison to the first tasks.
    """

    setting: Setting
    methods: Sequence[str]
    orders: Sequence[Order]
    out: Path
    data: Path | None = None
    tasks: int | None = None
    group_sizes: Sequence[int] | None = None
    on_progress: Callable[[CompareProgress], None] | None = None

    def start(self) -> Comparison:
        """Run all methods, or what an earlier call has left; write results.json and return the results."""
        contestants = find_contestants([*self.methods, CLOSED_FORM])
        scenario = self._scenario(self.orders[0])
        if any(task.test is None for task in scenario):
            raise ValueError(f"'{self.setting.recipe.name}' has a task without test images, so nothing can be measured")
        with self._lock():
            for name, contestant in contestants.items():  # shows what is wrong before the first task is learned
                method = contestant.make(self._setting(scenario))
                _check_memory(name, method, scenario)
                for order in self.orders:
                    self._run_of(name, contestant, method, replace(scenario, order=_name_of(order))).read()
            return self._run_all(contestants, scenario)

    def _run_all(self, contestants: dict[str, Contestant], first: Scenario) -> Comparison:
        results: list[MethodResult] = []
        failures: list[Failure] = []
        comparison = self._comparison([], [])
        for order in self.orders:
            scenario = first if order == self.orders[0] else self._scenario(order)
            for name, contestant in contestants.items():
                run = len(results) + len(failures)
                try:
                    results.append(self._measure(name, contestant, scenario, run, len(contestants) * len(self.orders)))
                except (ValueError, RuntimeError, ArithmeticError) as error:
                    failures.append(Failure(method=name, order=scenario.order, error=first_line(error)))
                comparison = self._comparison(results, failures)
                if self.setting.fabric.is_global_zero:
                    comparison.write(self.out / "results.json")
        return comparison

    def _measure(self, name: str, contestant: Contestant, scenario: Scenario, run: int, runs: int) -> MethodResult:
        """Run one method on one order."""
        method = contestant.make(self._setting(scenario))
        report = partial(self._report, name, scenario, run, runs)
        measured = self._run_of(name, contestant, method, scenario, report).start(list(scenario))
        return self._result(name, method, scenario, measured)

    def _run_of(
        self,
        name: str,
        contestant: Contestant,
        method: Method,
        scenario: Scenario,
        on_epoch: Callable[[EpochProgress], None] | None = None,
    ) -> MethodRun:
        """Return the run of a new method on an order."""
        setting, sizes = self._setting(scenario), sorted(set(self.group_sizes or self.setting.recipe.group_sizes))
        selectors = _selectors(method)
        identity = {
            "recipe": setting.recipe.name,
            "order": scenario.order,
            "seed": setting.seed,
            "classes": [len(task.classes) for task in scenario],
            "precision": precision_of(setting.fabric),
            "settings": _settings(method),
            "group sizes": sizes,
            "selectors": [stable_str(selector) for selector in selectors],
        }
        folder = self.out / f"order-{scenario.order}" / name
        load = partial(contestant.load, setting)
        return MethodRun(lambda: method, load, folder, identity, selectors, sizes, setting.seed, on_epoch)

    def _result(self, name: str, method: Method, scenario: Scenario, measured: Measured) -> MethodResult:
        evaluation = evaluation_of(measured.rows)
        return MethodResult(
            method=name,
            name=method.name,
            order=scenario.order,
            seed=self.setting.seed,
            assumes=method.assumes.encode(),
            settings=measured.identity["settings"],
            selector=method.selector.name,
            group_selector=method.group_selector.name,
            classes_per_task=tuple(len(task.classes) for task in scenario),
            task_il=evaluation.task_il,
            class_il=evaluation.class_il,
            kept=measured.kept,
            kept_while_learning=measured.kept_while_learning,
            image_passes=measured.image_passes,
            seconds=round(measured.seconds, 1),
            device=describe_device(self.setting.fabric),
            versions=versions(),
        )

    def _comparison(self, results: Sequence[MethodResult], failures: Sequence[Failure]) -> Comparison:
        setting = self.setting
        return Comparison(
            recipe=setting.recipe.name,
            budget=setting.budget,
            passes=setting.passes,
            memory=None if setting.memory is None else _describe_memory(setting.memory),
            results=tuple(results),
            failures=tuple(failures),
        )

    def _setting(self, scenario: Scenario) -> Setting:
        classes = sum(len(task.classes) for task in scenario)
        return replace(self.setting, tasks=len(scenario), classes=classes)

    def _scenario(self, order: Order) -> Scenario:
        scenario = self.setting.recipe.scenario(self.data, order, partial(self._report_decoding, order))
        return replace(scenario, tasks=scenario.tasks[: self.tasks])

    def _lock(self) -> AbstractContextManager[None]:
        return locked(self.out / "results.json") if self.setting.fabric.is_global_zero else nullcontext()

    def _report(self, name: str, scenario: Scenario, run: int, runs: int, at: EpochProgress) -> None:
        if self.on_progress is not None:
            place = (name, scenario.order, run, runs, at.task, len(scenario))
            self.on_progress(CompareProgress(*place, at.phase_name, at.epoch, at.epochs, at.loss))

    def _report_decoding(self, order: Order, done: int, images: int) -> None:
        if self.on_progress is not None:
            self.on_progress(CompareProgress("", order, 0, 0, 0, 0, "decoding images", done, images, None))


def _name_of(order: Order) -> int | str:
    """Return the name of an order in results."""
    return "identity" if order is None else order


def _describe_memory(memory: Memory) -> str:
    """Return how many images a memory holds as text."""
    return f"{memory.total} images" if memory.per_class is None else f"{memory.per_class} images of each class"


def _check_memory(name: str, method: Method, scenario: Scenario) -> None:
    """Raise `ValueError` if the memory of a method cannot hold an image of every class."""
    memory = getattr(method, "memory", None)
    if memory is not None:
        try:
            memory.quota(sum(len(task.classes) for task in scenario))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


def _selectors(method: Method) -> list[Selector]:
    """Return all selectors to evaluate."""
    known = method.config.selectors if isinstance(method, Learner) else getattr(method, "selectors", ())
    return list({each.name: each for each in (method.selector, method.group_selector, *known)}.values())


def _settings(method: Method) -> dict[str, Any]:
    """Return the settings of a method as JSON data."""
    if isinstance(method, Learner):
        return method.config.encode()
    describe = getattr(method, "describe", None)
    return {"method": encode(stable_str(method))} if describe is None else describe()["settings"]
