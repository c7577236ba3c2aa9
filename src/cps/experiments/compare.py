"""Compare methods on the tasks of a recipe: the same data, backbone, augmentation and budget for all.

The folder has a results.json, which is written after each method, and what an interrupted method resumes from.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from cps.data.tasks import Scenario
from cps.evaluation.method_evaluation import evaluation_of
from cps.experiments.comparison import Comparison, MethodResult
from cps.experiments.contestants import Contestant, Setting, find_contestants
from cps.experiments.method_run import EpochProgress, MethodRun
from cps.learner import Learner
from cps.method import Method
from cps.methods.trained_method import TrainedMethod
from cps.runtime.devices import precision_of
from cps.runtime.environment import describe_device, versions
from cps.selection.base import Selector
from cps.storage.settings_codec import encode, stable_str


@dataclass(frozen=True)
class CompareProgress:
    """The state of a comparison after an epoch: which method, on which order, of how many runs in all."""

    method: str
    order: int | str | None
    run: int
    runs: int
    tasks: int
    at: EpochProgress


def compare(
    setting: Setting,
    names: Sequence[str],
    orders: Sequence[int | None],
    folder: Path,
    *,
    data: Path | None = None,
    tasks: int | None = None,
    group_sizes: Sequence[int] | None = None,
    on_epoch: Callable[[CompareProgress], None] | None = None,
) -> Comparison:
    """Run methods on class orders, or what an earlier call has left; write and return the results."""
    contestants = find_contestants(names)
    comparison = Comparison(
        recipe=setting.recipe.name,
        budget=setting.budget,
        passes=setting.passes,
        memory=None if setting.memory is None else str(setting.memory),
    )
    results: list[MethodResult] = []
    runs = len(orders) * len(contestants)
    for order in orders:
        scenario = setting.recipe.scenario(data, order)
        scenario = replace(scenario, tasks=scenario.tasks[:tasks])
        for name, contestant in contestants.items():
            report = partial(_report, on_epoch, name, order, len(results), runs, len(scenario))
            out = folder / f"order-{scenario.order}" / name
            sizes = sorted(set(group_sizes or setting.recipe.group_sizes))
            results.append(_run(setting, name, contestant, scenario, out, sizes, report))
            comparison = replace(comparison, results=tuple(results))
            if setting.fabric.is_global_zero:
                comparison.write(folder / "results.json")
    return comparison


def _run(
    setting: Setting,
    name: str,
    contestant: Contestant,
    scenario: Scenario,
    folder: Path,
    group_sizes: Sequence[int],
    on_epoch: Callable[[EpochProgress], None],
) -> MethodResult:
    """Run one method on one order."""
    method = contestant.make(setting)
    selectors = _selectors(method)
    settings = _settings(method)
    identity = {
        "recipe": setting.recipe.name,
        "order": scenario.order,
        "seed": setting.seed,
        "classes": [len(task.classes) for task in scenario],
        "precision": precision_of(setting.fabric),
        "settings": settings,
    }
    measured = MethodRun(
        lambda: method,
        partial(contestant.load, setting),
        folder,
        identity,
        selectors,
        group_sizes,
        setting.seed,
        on_epoch,
    ).start(list(scenario))
    evaluation = evaluation_of(measured.rows)
    return MethodResult(
        method=name,
        name=method.name,
        order=scenario.order,
        seed=setting.seed,
        assumes=method.assumes.encode(),
        settings=settings,
        selector=method.selector.name,
        group_selector=method.group_selector.name,
        classes_per_task=tuple(len(task.classes) for task in scenario),
        task_il=evaluation.task_il,
        class_il=evaluation.class_il,
        kept=measured.kept,
        kept_while_learning=measured.kept_while_learning,
        image_passes=measured.image_passes,
        seconds=round(measured.seconds, 1),
        device=describe_device(setting.fabric),
        versions=versions(),
    )


def _selectors(method: Method) -> list[Selector]:
    """Return all selectors to evaluate."""
    known = method.config.selectors if isinstance(method, Learner) else ()
    return list({each.name: each for each in (method.selector, method.group_selector, *known)}.values())


def _settings(method: Method) -> dict[str, Any]:
    """Return the settings of a method as JSON data."""
    if isinstance(method, TrainedMethod):
        return method.describe()["settings"]
    if isinstance(method, Learner):
        return method.config.encode()
    return {"method": encode(stable_str(method))}


def _report(
    on_epoch: Callable[[CompareProgress], None] | None,
    method: str,
    order: int | None,
    run: int,
    runs: int,
    tasks: int,
    at: EpochProgress,
) -> None:
    if on_epoch is not None:
        on_epoch(CompareProgress(method, order, run, runs, tasks, at))
