"""Bench: run a recipe from start to end, or from where it stopped, and write what came out.

A run's folder holds `model.cps` (after each task), `checkpoint.safetensors` (after each epoch),
`results.json` and `report.html`.
"""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from cps.data.tasks import Scenario
from cps.evaluation.evaluator import evaluate
from cps.evaluation.weight_sharing import describe_weights
from cps.experiments.recipes import Recipe
from cps.experiments.report import write_report
from cps.learner import Learner
from cps.loading import load
from cps.methods.baselines import Baseline
from cps.network.backbones import Builtin
from cps.network.cost import describe_costs
from cps.runtime.devices import precision_of
from cps.runtime.environment import describe_device, versions
from cps.selection.statistics import missing_statistics
from cps.storage.container import remove, write_json
from cps.storage.lock import locked
from cps.storage.settings_codec import printed
from cps.training.progress import Progress
from cps.training.settings import Training
from cps.training.trainer import Epoch

if TYPE_CHECKING:
    from lightning_fabric import Fabric


@dataclass(frozen=True)
class Tick:
    """One more epoch of a run is done: of which phase and task, and how many of how many in all."""

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
    """One run of a recipe: where it writes, and what sets it apart from other runs."""

    recipe: Recipe
    out: Path
    fabric: "Fabric"
    seed: int = 0
    order: int | None = None
    tasks: int | None = None  # the first so many
    group_sizes: Sequence[int] | None = None
    data: Path | None = None
    weights: Path | None = None
    bounds: bool = True
    flips: bool = False
    watch: Callable[[Tick], None] | None = None

    def start(self) -> dict[str, Any]:
        """Run, or go on where an earlier call stopped; return the results, which are on the disk then."""
        with self.fabric.rank_zero_first():  # it may have to download
            scenario = self.recipe.scenario(self.data, self.order, self._tick_of_reading)
        scenario = replace(scenario, tasks=scenario.tasks[: self.tasks])
        if any(task.test is None for task in scenario):
            raise ValueError(f"'{self.recipe.name}' has a task without test images, so nothing could be measured")
        with locked(self.out / "model.cps") if self.fabric.is_global_zero else nullcontext():
            return self._run(scenario)

    def _run(self, scenario: Scenario) -> dict[str, Any]:
        self._claim_folder(scenario)
        learner = self._learn(scenario)
        began = time.monotonic()
        sizes = sorted(set(self.group_sizes or self.recipe.group_sizes))
        measured = evaluate(learner, scenario, group_sizes=sizes, seed=self.seed)
        flipped = evaluate(learner, scenario, group_sizes=sizes, seed=self.seed, flips=True) if self.flips else {}
        seconds = {"learn": self._clock(), "evaluate": time.monotonic() - began}
        weights, (dense, costs) = describe_weights(learner.network), describe_costs(learner.network)
        milliseconds = {"dense": dense.pop("milliseconds"), "tasks": [cost.pop("milliseconds") for cost in costs]}
        weights["subnetworks"] = [{**known, **cost} for known, cost in zip(weights["subnetworks"], costs, strict=True)]
        results = {
            "recipe": self.recipe.name,
            "order": scenario.order,
            "seed": self.seed,
            **self._how(),
            "device": describe_device(self.fabric),
            "versions": versions(),
            "seconds": seconds,
            "milliseconds_per_image": milliseconds,
            "classes_per_task": [len(task.classes) for task in scenario],
            **measured,
            "flips": flipped,
            "default_selector": learner.selectors[0].name,
            "bounds": self._bounds(scenario) if self.bounds else {},
            "dense": dense,
            **weights,
            "fingerprints": [subnetwork.digest for subnetwork in learner.network.subnetworks],
        }
        if self.fabric.is_global_zero:
            write_json(self.out / "results.json", results)
            write_report(self.out / "report.html", [results])
        self.fabric.barrier()
        return results

    def _learn(self, scenario: Scenario) -> Learner:
        """Learn the tasks that the model file does not hold yet; save after each."""
        model, checkpoint = self.out / "model.cps", self.out / "checkpoint.safetensors"
        backbone = self._fresh_backbone()
        settings = {**self.recipe.learner_settings(), "seed": self.seed}
        if model.exists():
            learner = load(model, backbone, **settings, fabric=self.fabric)
            for selector, _ in missing_statistics(learner.selectors, learner.network):
                raise ValueError(f"'{self.out}' holds a run that kept no numbers for {selector.name}")
        else:
            learner = Learner(backbone, **settings, fabric=self.fabric)
        if isinstance(self.recipe.backbone, Builtin):
            learner.builtin = self.recipe.backbone  # so that the file opens without code
        learner.watch = lambda at: self._tick_of_learner(at, len(scenario))
        for task in list(scenario)[len(learner.network.subnetworks) :]:
            began = time.monotonic()
            try:
                learner.learn(task, checkpoint=checkpoint)
                learner.save(model)
            finally:  # stopped half-way, it goes on later
                self._clock(time.monotonic() - began)
        if self.fabric.is_global_zero:
            remove(checkpoint)
        return learner

    def _fresh_backbone(self) -> nn.Module:
        backbone = self.recipe.drawn(self.seed)
        if self.recipe.pretrained is not None:
            self.recipe.pretrained(backbone, self.weights)
        return backbone

    def _bounds(self, scenario: Scenario) -> dict[str, Any]:
        """Return finetuning and joint training; one that was finished before is read back."""
        bounds: dict[str, Any] = {}
        for name in ("finetuning", "joint"):
            kept = self.out / f"{name}.json"
            if not kept.exists():
                checkpoint = self.out / f"{name}.safetensors"
                measured = getattr(self._baseline(scenario, name), name)(checkpoint)
                if self.fabric.is_global_zero:
                    write_json(kept, measured)
                    remove(checkpoint)
                self.fabric.barrier()
            bounds[name] = json.loads(kept.read_text())
        return bounds

    def _baseline(self, scenario: Scenario, name: str) -> Baseline:
        recipe = self.recipe
        phases = len(scenario) if name == "finetuning" else 1
        return Baseline(
            self._fresh_backbone(),
            list(scenario),
            self._training_of(name),
            fabric=self.fabric,
            augment=recipe.augment,
            normalize=recipe.normalize,
            seed=self.seed,
            watch=lambda phase, at: self._tick_of_baseline(name, phase, phases, at),
        )

    def _training_of(self, name: str) -> Training:
        return (self.recipe.joint if name == "joint" else None) or self.recipe.train

    def _tick_of_learner(self, at: Progress, tasks: int) -> None:
        done, total = at.task * at.total + at.done, tasks * at.total
        self._tick(Tick(at.words, at.task, tasks, at.epoch, at.epochs, at.loss, done, total))

    def _tick_of_reading(self, done: int, images: int) -> None:
        self._tick(Tick("decoding images", 0, 1, done, images, None, 0, 0))

    def _tick_of_baseline(self, name: str, phase: int, phases: int, at: Epoch) -> None:
        each = self._training_of(name).epochs
        self._tick(Tick(name, phase, phases, at.done, each, at.loss, phase * each + at.done, phases * each))

    def _tick(self, tick: Tick) -> None:
        if self.watch is not None:
            self.watch(tick)

    def _claim_folder(self, scenario: Scenario) -> None:
        """Refuse a folder that holds a run of something else."""
        mine = {
            "recipe": self.recipe.name,
            "order": scenario.order,
            "seed": self.seed,
            "tasks": len(scenario),
            **self._how(),
        }
        note = self.out / "run.json"
        if not note.exists() and self.fabric.is_global_zero:
            write_json(note, {**mine, "seconds": 0.0})
        self.fabric.barrier()
        found, mine = _flat(json.loads(note.read_text())), _flat(mine)
        differing = [f"{name} {found[name]}" for name in mine if found.get(name, mine[name]) != mine[name]]
        if differing:
            raise ValueError(
                f"'{self.out}' holds another run ({', '.join(differing)}); choose another --out or delete it"
            )

    def _how(self) -> dict[str, Any]:
        """Return what the recipe alone does not say about how tasks are learned."""
        recipe = self.recipe
        return {
            "epochs": [recipe.train.epochs, recipe.retrain.epochs],
            "rounds": recipe.rounds,
            "precision": precision_of(self.fabric),
            "settings": self._settings,
        }

    @cached_property
    def _settings(self) -> dict[str, str]:
        """Return how tasks are learned, pruned and found, in words."""
        settings = self.recipe.learner_settings()
        del settings["rounds"]  # which is said beside these
        settings |= {f"selector {each.name}": each for each in settings.pop("selectors")}
        settings["backbone"] = f"{sum(weight.numel() for weight in self.recipe.drawn(0).parameters()):,} weights"
        for phase in ("train", "retrain"):
            training = settings.pop(phase)
            parts = [field.name for field in fields(training) if field.name != "epochs"]
            settings |= {f"{phase}: {part}": getattr(training, part) for part in parts}
        return {name: printed(value) for name, value in settings.items()}

    def _clock(self, seconds: float = 0.0) -> float:
        """Add to the time spent learning, over all calls, and return it."""
        note = self.out / "run.json"
        found = json.loads(note.read_text())
        found["seconds"] += seconds
        if seconds and self.fabric.is_global_zero:
            write_json(note, found)
        return found["seconds"]


def _flat(note: dict[str, Any]) -> dict[str, Any]:
    """Return a note of a run with its settings beside all else."""
    return {name: value for name, value in note.items() if name != "settings"} | note.get("settings", {})
