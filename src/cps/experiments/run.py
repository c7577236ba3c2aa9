"""Run a recipe from start to end, or resume it, and write the results.

The folder of a run holds `model.cps` (written after each task), `checkpoint.safetensors` (after each epoch),
`results.json` and `report.html`.
"""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cps.data.tasks import Scenario
from cps.evaluation.evaluator import evaluate
from cps.evaluation.method_evaluation import evaluation_of
from cps.evaluation.metrics import Metrics
from cps.evaluation.weight_sharing import WeightSharing, measure_weight_sharing
from cps.experiments.contestants import CONTESTANTS, Setting, load_learner, make_closed_form, make_learner
from cps.experiments.method_run import EpochProgress, MethodRun
from cps.experiments.recipes import Recipe
from cps.experiments.report import write_report
from cps.experiments.results import (
    Bounds,
    DenseCost,
    JointMetrics,
    MillisecondsPerImage,
    Results,
    Seconds,
    SubnetworkCost,
    upgrade_settings_text,
    write_results,
)
from cps.learner import Learner
from cps.methods.closed_form import ClosedForm
from cps.methods.closed_form_metrics import ClosedFormMetrics, measure_closed_form
from cps.network.cost import measure_costs
from cps.network.shared import SharedNetwork
from cps.runtime.devices import on_rank_zero, precision_of
from cps.runtime.environment import describe_device, versions
from cps.selection.max_output import MaxOutput
from cps.selection.statistics import missing_statistics
from cps.storage.atomic import remove, write_json
from cps.storage.json_codec import from_json, to_json
from cps.storage.lock import locked
from cps.storage.settings_codec import encode, stable_str
from cps.training.progress import Progress

if TYPE_CHECKING:
    from lightning_fabric import Fabric


@dataclass(frozen=True)
class RunProgress:
    """The state of a run after an epoch, or after some images were decoded.

    `epoch` of `epochs` are finished in this phase of the task (images, while they are decoded), and `done` of `total`
    in all tasks; `total` is 0 while images are decoded.
    """

    phase: str
    task: int
    tasks: int
    epoch: int
    epochs: int
    loss: float | None
    done: int
    total: int


@dataclass(frozen=True)
class Run:
    """One run of a recipe: the folder it writes to, and what distinguishes it from other runs.

    `tasks` limits the run to the first tasks. `data` is the folder of the data set, `weights` the file of pretrained
    weights. With `bounds`, finetuning, joint training and a closed form run too, and with `flips` the evaluation is
    repeated with mirror images.
    """

    recipe: Recipe
    out: Path
    fabric: "Fabric"
    seed: int = 0
    order: int | str | None = None
    tasks: int | None = None
    group_sizes: Sequence[int] | None = None
    data: Path | None = None
    weights: Path | None = None
    bounds: bool = True
    flips: bool = False
    on_progress: Callable[[RunProgress], None] | None = None

    def start(self) -> Results:
        """Run the recipe, or resume an earlier call; return the results after writing them to the folder."""
        with self.fabric.rank_zero_first():  # the first process may have to download
            scenario = self.recipe.scenario(self.data, self.order, self._report_decoding)
        scenario = replace(scenario, tasks=scenario.tasks[: self.tasks])
        if any(task.test is None for task in scenario):
            raise ValueError(f"'{self.recipe.name}' has a task without test images, so there is nothing to measure")
        with locked(self.out / "model.cps") if self.fabric.is_global_zero else nullcontext():
            return self._run(scenario)

    def _run(self, scenario: Scenario) -> Results:
        self._claim_folder(scenario)
        learner = self._learn(scenario)
        start = time.monotonic()
        sizes = self._sizes
        evaluation = evaluate(learner, scenario, group_sizes=sizes, seed=self.seed)
        flips = evaluate(learner, scenario, group_sizes=sizes, seed=self.seed, flips=True) if self.flips else None
        seconds = Seconds(learn=self._learning_seconds(), evaluate=time.monotonic() - start)
        sharing = measure_weight_sharing(learner.network)
        milliseconds, dense, subnetworks = _measure_costs(learner.network, sharing)
        results = Results(
            recipe=self.recipe.name,
            order=scenario.order,
            seed=self.seed,
            **self._training_settings,
            device=describe_device(self.fabric),
            versions=versions(),
            seconds=seconds,
            milliseconds_per_image=milliseconds,
            classes_per_task=tuple(len(task.classes) for task in scenario),
            task_il=evaluation.task_il,
            class_il=evaluation.class_il,
            flips=flips,
            default_selector=learner.config.selectors[0].name,
            confusion=evaluation.confusion,
            bounds=self._run_bounds(scenario) if self.bounds else Bounds(),
            dense=dense,
            weights=sharing.weights,
            subnetworks=subnetworks,
            layers=sharing.layers,
            sharing=sharing.sharing,
            fingerprints=tuple(subnetwork.digest for subnetwork in learner.network.subnetworks),
        )
        if self.fabric.is_global_zero:
            write_results(self.out / "results.json", results)
            write_report(self.out / "report.html", [results])
        self.fabric.barrier()
        return results

    def _learn(self, scenario: Scenario) -> Learner:
        """Learn the tasks that the model file does not hold yet, and save after each."""
        model, checkpoint = self.out / "model.cps", self.out / "checkpoint.safetensors"
        if model.exists():
            learner = load_learner(self._setting, model)
            for selector, _ in missing_statistics(learner.config.selectors, learner.network):
                raise ValueError(
                    f"the run in '{self.out}' has no statistics for {selector.name}; choose another --out or delete it"
                )
        else:
            learner = make_learner(self._setting)
        for task in list(scenario)[len(learner.network.subnetworks) :]:
            start = time.monotonic()
            try:
                learner.learn(task, checkpoint=checkpoint, on_epoch=lambda at: self._report_learning(at, len(scenario)))
                learner.save(model)
            finally:  # count the time of interrupted calls, too
                self._learning_seconds(time.monotonic() - start)
        if self.fabric.is_global_zero:
            remove(checkpoint)
        return learner

    @property
    def _setting(self) -> Setting:
        """What the learner and the bounds have in common; the bounds are trained by the recipe."""
        return Setting(self.recipe, self.fabric, budget="own", seed=self.seed, weights=self.weights)

    def _run_bounds(self, scenario: Scenario) -> Bounds:
        """Run finetuning and joint training, or read their results if they have finished before."""
        finetuning = self._run_bound("finetuning", scenario)
        joint = self._run_bound("joint", scenario).accuracy
        return Bounds(finetuning, JointMetrics(float(joint[0].mean()), joint), self._run_closed_form(scenario))

    def _run_bound(self, name: str, scenario: Scenario) -> Metrics:
        """Return the accuracy of a method on single images, after each task if it learns them one after the other."""
        contestant = CONTESTANTS[name]
        method: Any = contestant.make(self._setting)
        phases = 1 if name == "joint" else len(scenario)
        measured = MethodRun(
            lambda: method,
            partial(contestant.load, self._setting),
            self.out / name,
            identity={"seed": self.seed, "training": encode(method.train)},
            selectors=[MaxOutput()],
            group_sizes=[1],
            seed=self.seed,
            on_epoch=lambda at: self._report_bound(method.name, phases, at),
        ).start(list(scenario))
        return evaluation_of(measured.rows).class_il[MaxOutput().name][1]

    def _run_closed_form(self, scenario: Scenario) -> ClosedFormMetrics:
        """Measure a closed form, or read its results if it was measured at these group sizes before."""
        path = self.out / "closed_form.json"
        found = from_json(ClosedFormMetrics, json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None
        self.fabric.barrier()
        if found is None or not set(self._sizes) <= set(found.class_il):
            on_rank_zero(self.fabric, lambda: write_json(path, to_json(self._measure_closed_form(scenario))))
            found = from_json(ClosedFormMetrics, json.loads(path.read_text(encoding="utf-8")))
        return replace(found, class_il={size: found.class_il[size] for size in self._sizes})

    def _measure_closed_form(self, scenario: Scenario) -> ClosedFormMetrics:
        return measure_closed_form(
            make_closed_form(self._setting),
            list(scenario),
            group_sizes=self._sizes,
            seed=self.seed,
            on_task=lambda done: self._report_closed_form(done, len(scenario)),
        )

    def _report_decoding(self, done: int, images: int) -> None:
        self._report(RunProgress("decoding images", 0, 1, done, images, None, 0, 0))

    def _report_learning(self, at: Progress, tasks: int) -> None:
        done, total = at.task * at.total + at.done, tasks * at.total
        self._report(RunProgress(at.phase_name, at.task, tasks, at.epoch, at.epochs, at.loss, done, total))

    def _report_bound(self, name: str, phases: int, at: EpochProgress) -> None:
        phase = min(at.task, phases - 1)
        done, total = phase * at.epochs + at.epoch, phases * at.epochs
        self._report(RunProgress(name, phase, phases, at.epoch, at.epochs, at.loss, done, total))

    def _report_closed_form(self, done: int, tasks: int) -> None:
        self._report(RunProgress(ClosedForm.name, done - 1, tasks, done, tasks, None, done, tasks))

    def _report(self, progress: RunProgress) -> None:
        if self.on_progress is not None:
            self.on_progress(progress)

    def _claim_folder(self, scenario: Scenario) -> None:
        """Write `run.json`, which describes the run; raise `ValueError` if the folder has another run."""
        own = to_json(
            {
                "recipe": self.recipe.name,
                "order": scenario.order,
                "seed": self.seed,
                "tasks": len(scenario),
                **self._training_settings,
            }
        )
        path = self.out / "run.json"
        if not path.exists() and self.fabric.is_global_zero:
            write_json(path, {**own, "seconds": 0.0})
        self.fabric.barrier()
        found, own = _flatten(json.loads(path.read_text(encoding="utf-8"))), _flatten(own)
        differing = [f"{name} {found[name]}" for name in own if found.get(name, own[name]) != own[name]]
        if differing:
            raise ValueError(
                f"'{self.out}' holds another run ({', '.join(differing)}); choose another --out or delete it"
            )

    @property
    def _sizes(self) -> list[int]:
        """The group sizes to evaluate."""
        return sorted(set(self.group_sizes or self.recipe.group_sizes))

    @cached_property
    def _training_settings(self) -> dict[str, Any]:
        """How tasks are learned, pruned and selected, which options may have changed from the recipe."""
        settings = self.recipe.learner_settings()
        del settings["rounds"]  # rounds have their own entry
        settings |= {f"selector {selector.name}": selector for selector in settings.pop("selectors")}
        weights = sum(weight.numel() for weight in self.recipe.make_backbone(0).parameters())
        settings["backbone"] = f"{weights:,} weights"
        for phase in ("train", "retrain"):
            training = settings.pop(phase)
            names = [field.name for field in fields(training) if field.name != "epochs"]
            settings |= {f"{phase}: {name}": getattr(training, name) for name in names}
        return {
            "epochs": (self.recipe.train.epochs, self.recipe.retrain.epochs),
            "rounds": self.recipe.rounds,
            "precision": precision_of(self.fabric),
            "settings": {name: stable_str(value) for name, value in settings.items()},
        }

    def _learning_seconds(self, more: float = 0.0) -> float:
        """Add to the time spent on learning, over all calls, and return it."""
        path = self.out / "run.json"
        run = json.loads(path.read_text(encoding="utf-8"))
        run["seconds"] += more
        if more and self.fabric.is_global_zero:
            write_json(path, run)
        return run["seconds"]


def _measure_costs(
    network: SharedNetwork, sharing: WeightSharing
) -> tuple[MillisecondsPerImage, DenseCost, tuple[SubnetworkCost, ...]]:
    """Return times and costs of the dense network and of each subnetwork."""
    dense, costs = measure_costs(network)
    milliseconds = MillisecondsPerImage(dense.milliseconds, tuple(cost.milliseconds for cost in costs))
    shares = zip(sharing.density, sharing.taken, costs, strict=True)
    subnetworks = tuple(
        SubnetworkCost(task, density, taken, cost.parameters, cost.operations)
        for task, (density, taken, cost) in enumerate(shares)
    )
    return milliseconds, DenseCost(dense.parameters, dense.operations), subnetworks


def _flatten(run: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of run.json with those of "settings" moved to the top level, under their present names."""
    entries = {name: value for name, value in run.items() if name != "settings"}
    return entries | upgrade_settings_text(run.get("settings", {}))
