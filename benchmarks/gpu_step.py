"""`python -m benchmarks.gpu_step`: decide whether the custom GPU kernels are worth keeping.

Three variants of the training step are measured for each backbone, each in a new process with empty compiler caches:

- custom: the captured step with custom kernels for convolutions, norms and the optimizer;
- compiled: the same captured step without any custom kernel: convolutions by cuDNN, the rest by torch.compile;
- plain: the plain steps, as on a CPU.

All of them train in bf16 with deterministic kernels and restore the guarded weights. Results are written after each
measurement, so a run that is interrupted, or that ends at its time limit, continues when it is started again.
`--quick` measures tiny sizes in this process, on the CPU if need be; it shows only that the script works.
"""

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import cps
from benchmarks.training import half_taken_draft
from cps.data.augmentation import Augmentation
from cps.data.batch_transform import BatchTransform
from cps.data.examples import TensorExamples
from cps.data.normalize import Normalize, Prepare
from cps.network.backbones import large_resnet18, resnet18, resnet18_third, resnet32
from cps.network.classifier import Classifier
from cps.network.cost import measure_seconds
from cps.network.freezing import Guard
from cps.runtime.cuda_graphs import WARMUP_CALLS
from cps.runtime.devices import cuda_device, deterministic_cudnn, full_precision
from cps.runtime.environment import describe_device, versions
from cps.storage.atomic import write_json
from cps.training.cuda.captured_step import CapturedStep
from cps.training.steps import EpochPlan, PlainSteps, TrainingSteps

if TYPE_CHECKING:
    from lightning_fabric import Fabric

ROOT = Path(__file__).parents[1]
VARIANTS = ("custom", "compiled", "plain")
MIN_SAVING = 0.10  # of the step time, from which custom kernels are worth their code
MIN_SECONDS = 1.0  # of timing
MAX_SECONDS = 150.0  # of a measurement, including compilation
CLASSES = 10
SMALL = cps.Chain((cps.PadCrop(4), cps.Flip()))
LARGE = cps.Chain((cps.ResizedCrop(), cps.Flip()))
PREPARE = Prepare(Normalize((0.5, 0.5, 0.5), (0.2, 0.2, 0.2)))
# With SGD the weights move in proportion to the gradients, so their distance shows the error of the gradients.
OPTIMIZER = cps.SGD(0.01)


@dataclass(frozen=True)
class Case:
    """A backbone, the size of its images, and how many steps of which batch size are taken."""

    backbone: Callable[[], nn.Module]
    features: int
    size: int
    augment: Augmentation = SMALL
    batch: int = 128
    steps: int = 8  # of an epoch
    epochs: int = 25  # at least, to time


CASES = {
    "resnet18 at 32": Case(resnet18, 512, 32),
    "resnet32 at 32": Case(resnet32, 64, 32),
    "resnet18 at 224": Case(large_resnet18, 512, 224, LARGE),
    "resnet18 (1/3) at 32": Case(
        resnet18_third, 170, 32
    ),  # the widths of the paper, for which the kernels were written
}
QUICK_CASES = {
    "resnet18 at 32": Case(partial(resnet18, 3, (5, 6, 7, 8)), 8, 8, batch=4, steps=2, epochs=2),
    "resnet32 at 32": Case(resnet32, 64, 8, batch=4, steps=2, epochs=2),
    "resnet18 at 224": Case(large_resnet18, 512, 32, LARGE, batch=2, steps=2, epochs=2),
}


def main(arguments: list[str] | None = None) -> None:
    """Measure what is missing in the file of results, and print a table and the verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-step.json"))
    parser.add_argument("--seconds", type=float, default=460.0, help="time limit of the whole run")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, in this process")
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # "case/variant", for the new process
    options = parser.parse_args(arguments)
    cases = QUICK_CASES if options.quick else CASES
    fabric = cps.make_fabric(accelerator=options.accelerator, precision="bf16-mixed")
    if options.measure:
        case, variant = options.measure.rsplit("/", 1)
        print(json.dumps(measure(cases[case], variant, fabric)))
        return
    if fabric.device.type != "cuda" and not options.quick:
        parser.error("there is no GPU; --quick runs on a CPU")
    console, start = Console(), time.monotonic()
    results = _load(options.out, fabric, options.quick)
    missing = [f"{case}/{variant}" for case in cases for variant in VARIANTS]
    missing = [name for name in missing if "error" in results["results"].get(name, {"error": "not measured"})]
    for name in missing:
        remaining = options.seconds - (time.monotonic() - start)
        if remaining <= 0:
            console.print("The time is up. Run the same command again to measure the rest.")
            break
        with console.status(f"{name} ..."):
            case, variant = name.rsplit("/", 1)
            results["results"][name] = (
                measure(cases[case], variant, fabric)
                if options.quick
                else measure_in_new_process(name, ["--accelerator", options.accelerator], min(remaining, MAX_SECONDS))
            )
        write_json(options.out, results)
    results["verdict"] = verdict(results["results"], list(cases), is_gpu=fabric.device.type == "cuda")
    write_json(options.out, results)
    console.print(_table(results["results"]))
    console.print(f"Wrote {options.out} ({results['device']}, torch {torch.__version__})", soft_wrap=True)
    console.print(results["verdict"], soft_wrap=True, highlight=False)


def measure(case: Case, variant: str, fabric: "Fabric") -> dict[str, Any]:
    """Return the time of a step and until the first one, the peak memory and the distance from full precision.

    The distance is that of the weights from those of plain steps in float32, relative to how far those have moved.
    """
    device = fabric.device
    torch.manual_seed(0)
    draft = half_taken_draft(case.backbone(), case.features, device, CLASSES)
    model, guard = draft.model, draft.guard()
    initial = copy.deepcopy(model.state_dict())
    examples, plan = _epoch(case, device)
    training = cps.Training(1, OPTIMIZER, batch_size=case.batch)
    transform = BatchTransform(PREPARE, case.augment)

    def distances(make_steps: Callable[[], TrainingSteps]) -> list[Tensor]:
        plans = _first_step(plan), plan
        return [_movement(make_steps(), model, initial, guard, examples, each) for each in plans]

    with cuda_device(device), deterministic_cudnn():
        _reset_peak_memory(device)
        start = time.perf_counter()
        steps = _make_steps(variant, model, examples, training, transform, fabric)
        steps.begin(model.train(), guard, None)
        measure_seconds(lambda: steps.run(examples, _first_step(plan)), device)  # waits for the GPU
        until_first = time.perf_counter() - start
        times = _time_epochs(lambda: steps.run(examples, plan), case, device)
        peak = torch.cuda.max_memory_reserved(device) / 2**20 if device.type == "cuda" else None
        # A captured step starts with a new optimizer state; plain steps must be made again.
        is_plain = isinstance(steps, PlainSteps)
        moved = distances(lambda: PlainSteps(model, training, fabric, transform) if is_plain else steps)
    exact_fabric = cps.make_fabric(accelerator=device.type, precision="32-true")
    with cuda_device(device), full_precision():
        exact = distances(lambda: PlainSteps(model, training, exact_fabric, transform))
    errors = [float((found - value).norm() / value.norm()) for found, value in zip(moved, exact, strict=True)]
    return {
        "step_ms": 1000 * median(times) / case.steps,
        "first_step_seconds": until_first,
        "peak_mib": peak,
        "distance_after_one_step": errors[0],
        "distance_after_an_epoch": errors[1],
        "timed_epochs": len(times),
        "ran": _describe(steps, device),
    }


def verdict(results: Mapping[str, Mapping[str, Any]], cases: list[str], *, is_gpu: bool) -> str:
    """Return one line: for each case, how much custom kernels save against torch.compile, and whether they stay."""
    parts = []
    for case in cases:
        custom, compiled = (results.get(f"{case}/{variant}", {}) for variant in ("custom", "compiled"))
        if "step_ms" not in custom or "step_ms" not in compiled:
            parts.append(f"{case}: not measured")
            continue
        saving = 1 - custom["step_ms"] / compiled["step_ms"]
        if not is_gpu:
            parts.append(f"{case}: {saving:+.0%}")
        elif custom["ran"]["has_custom_kernels"] and compiled["ran"]["is_compiled"]:
            parts.append(f"{case}: {saving:+.0%}, {'keep' if saving > MIN_SAVING else 'drop'}")
        else:
            parts.append(f"{case}: {saving:+.0%}, undecided, since a variant could not be built")
    head = "Verdict: custom kernels save" if is_gpu else "No verdict (these are not GPU figures): custom kernels save"
    return f"{head} {'; '.join(parts)} (they stay where they save more than {MIN_SAVING:.0%} of a step)"


def _make_steps(
    variant: str,
    model: Classifier,
    examples: TensorExamples,
    training: cps.Training,
    transform: BatchTransform,
    fabric: "Fabric",
) -> TrainingSteps:
    if variant == "plain":
        return PlainSteps(model, training, fabric, transform)
    is_custom = variant == "custom"
    return CapturedStep(
        model,
        examples.images[: training.batch_size],
        training,
        transform,
        is_bf16=True,
        has_custom_kernels=is_custom,
        can_compile=not is_custom and fabric.device.type == "cuda",  # on a CPU, compiling takes minutes
    )


def _describe(steps: TrainingSteps, device: torch.device) -> dict[str, bool]:
    """Return what really ran, since a captured step can do without custom kernels and torch.compile."""
    is_captured = isinstance(steps, CapturedStep)
    return {
        "is_captured": is_captured and device.type == "cuda",
        "has_custom_kernels": is_captured and steps.optimizer_step.has_custom_kernel,
        "is_compiled": is_captured and steps.is_compiled,
    }


def _epoch(case: Case, device: torch.device) -> tuple[TensorExamples, EpochPlan]:
    """Return the images of an epoch as bytes on the device, and the plan of its steps."""
    number, draws = case.batch * case.steps, torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (number, 3, case.size, case.size), dtype=torch.uint8, generator=draws)
    labels = torch.randint(0, CLASSES, (number,), generator=draws)
    uniform = torch.rand(number, case.augment.draws, generator=draws)
    order, ones = torch.arange(number).split(case.batch), [1.0] * case.steps
    return TensorExamples(images.to(device), labels.to(device)), EpochPlan(order, uniform, ones, ones)


def _reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _time_epochs(run: Callable[[], object], case: Case, device: torch.device) -> list[float]:
    """Return the seconds of each of several epochs, after a warm-up in which all graphs are captured."""
    for _ in range(WARMUP_CALLS + 2 if device.type == "cuda" else 1):
        run()
    times = [measure_seconds(run, device) for _ in range(case.epochs)]
    while sum(times) < MIN_SECONDS and device.type == "cuda":
        times.append(measure_seconds(run, device))
    return times


def _first_step(plan: EpochPlan) -> EpochPlan:
    return EpochPlan(plan.order[:1], plan.uniform, plan.factors[:1], plan.loss_weights[:1])


def _movement(
    steps: TrainingSteps,
    model: Classifier,
    initial: Mapping[str, Tensor],
    guard: Guard,
    examples: TensorExamples,
    plan: EpochPlan,
) -> Tensor:
    """Return how far an epoch moves all parameters, from the same initial weights."""
    model.load_state_dict(initial)
    steps.begin(model.train(), guard, None)
    steps.run(examples, plan)
    steps.write_back()
    return torch.cat([(value.detach() - initial[name]).flatten() for name, value in model.named_parameters()])


def measure_in_new_process(name: str, options: list[str], limit: float) -> dict[str, Any]:
    """Return a measurement that a new process makes, with empty caches of compiled kernels; or its error."""
    command = [sys.executable, "-m", "benchmarks.gpu_step", *options, "--measure", name]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TRITON_CACHE_DIR": f"{cache}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{cache}/torch"}
        run = partial(subprocess.run, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        try:
            done = run(command, timeout=limit)
        except subprocess.TimeoutExpired:
            return {"error": f"stopped after {limit:.0f} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def _load(path: Path, fabric: "Fabric", is_quick: bool) -> dict[str, Any]:
    """Return earlier results of the same device and versions, or an empty record."""
    new = {"device": describe_device(fabric), "versions": versions(), "is_quick": is_quick}
    if path.exists():
        old = json.loads(path.read_text(encoding="utf-8"))
        if {key: old.get(key) for key in new} == new:
            return old
    path.parent.mkdir(parents=True, exist_ok=True)
    note = {} if fabric.device.type == "cuda" else {"note": "not GPU figures: no custom kernel, torch.compile or graph"}
    return {**new, **note, "results": {}}


def _table(results: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table("case", "variant", "step", "first step", "peak memory", "distance, 1 step", "epoch")
    for name, result in results.items():
        case, variant = name.rsplit("/", 1)
        if "error" in result:
            table.add_row(case, variant, f"failed: {result['error']}")
            continue
        peak = "" if result["peak_mib"] is None else f"{result['peak_mib']:.0f} MiB"
        times = f"{result['step_ms']:.2f} ms", f"{result['first_step_seconds']:.1f} s"
        distances = (f"{result[f'distance_after_{steps}']:.2%}" for steps in ("one_step", "an_epoch"))
        table.add_row(case, variant, *times, peak, *distances)
    return table


if __name__ == "__main__":
    main()
