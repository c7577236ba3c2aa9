"""How costs grow with the number of tasks (up to 50), classes, layers, image size and batch size."""

import math
import resource
import statistics
import tempfile
import warnings
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter
from torch import nn

import cps
from benchmarks.timing import compare, make_row
from benchmarks.training import half_taken_draft, masked_step, plain_step
from cps.network.backbones import ResNet
from cps.network.classifier import Classifier
from cps.network.cost import measure_seconds

if TYPE_CHECKING:
    from lightning_fabric import Fabric

Selectors = list[cps.Selector]

TASKS = 50
PREDICT_AT = (2, 5, 10, 20, 35, 50)  # numbers of tasks at which prediction is timed
WARM_UP = 5  # tasks until kernels are chosen and memory is allocated


def measure_growth(fabric: "Fabric") -> dict[str, Any]:
    """Measure how costs grow, and return the measurements as JSON data."""
    return {
        "tasks": _by_tasks(fabric, [cps.MaxOutput()]),
        "cascade": _by_tasks(fabric, [cps.Cascade()]),
        "step": _by_size(fabric),
    }


def make_rows(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the measurements as rows of the table."""
    tasks, step = measured["tasks"], measured["step"]
    rows = _task_rows(tasks, "")
    ten, fifty = tasks["peak_mib"][9], tasks["peak_mib"][-1]
    rows.append(make_row("peak memory, 50 tasks against 10", f"{fifty:.0f} MiB", f"{ten:.0f} MiB", fifty / ten))
    rows += _task_rows(measured["cascade"], ", with the cascade")
    for axis, points in step.items():
        ratios = [point["ratio"] for point in points]
        sizes = f"{points[0]['at']} to {points[-1]['at']}"
        texts = f"{1e3 * points[-1]['ours']:.1f} ms", f"{1e3 * points[-1]['dense']:.1f} ms"
        rows.append(make_row(f"masked step against dense, {axis} {sizes}, largest ratio", *texts, max(ratios)))
    return rows


def _task_rows(tasks: dict[str, Any], suffix: str) -> list[dict[str, Any]]:
    """Return rows about learning, file size and prediction with many tasks."""
    late, early, ratio = tasks["late"]
    ten, fifty = (tasks["predict"][str(number)] for number in (10, 50))
    learning = f"learning a task after {TASKS} others, against an early task{suffix}"
    predicting = f"prediction, 50 tasks against 10 (linear: 5){suffix}"
    return [
        make_row(learning, f"{late:.3f} s", f"{early:.3f} s", ratio),
        _growth_row(f"file size, tasks 41-50 against 6-15, bytes per task{suffix}", tasks["file_bytes"]),
        make_row(predicting, f"{1e3 * fifty:.1f} ms", f"{1e3 * ten:.1f} ms", fifty / ten),
    ]


def plot(measured: dict[str, Any]) -> Figure:
    """Plot how costs grow."""
    tasks, step = measured["tasks"], measured["step"]
    figure, axes = plt.subplots(2, 3, figsize=(11, 6), constrained_layout=True)
    numbers = range(1, len(tasks["seconds"]) + 1)
    added = [size / 1024 for size in _differences(tasks["file_bytes"])]
    _panel(axes[0, 0], numbers[1:], tasks["seconds"][1:], "time to learn a task after the first (s)", "task")
    _panel(axes[0, 1], numbers[1:], added, "file size added by a task (KiB)", "task")
    _panel(axes[0, 2], numbers, tasks["peak_mib"], "peak memory (MiB)", "task")
    at = [int(number) for number in tasks["predict"]]
    axes[1, 0].plot(at, [1e3 * s for s in tasks["predict"].values()], marker="o", label="measured")
    per_task = next(iter(tasks["predict"].values())) / at[0]
    axes[1, 0].plot(at, [1e3 * per_task * number for number in at], linestyle=":", label="linear")
    axes[1, 0].legend()
    axes[1, 0].set(title="time to predict 256 images (ms)", xlabel="tasks learned")
    for axis, points in step.items():
        axes[1, 1].plot(range(len(points)), [point["ratio"] for point in points], marker="o", label=axis)
    axes[1, 1].axhline(1.0, color="grey", linewidth=0.8)
    axes[1, 1].set(title="masked step / dense step", xlabel="small to large", ylim=(0, 1.5), xticks=[])
    axes[1, 1].legend()
    for axis, points in step.items():
        sizes = [point["at"] / points[0]["at"] for point in points]
        axes[1, 2].plot(sizes, [point["ours"] / points[0]["ours"] for point in points], marker="o", label=axis)
    axes[1, 2].set(
        title="time of a masked step, relative",
        xlabel="size, relative to the smallest",
        xscale="log",
        yscale="log",
    )
    for side in (axes[1, 2].xaxis, axes[1, 2].yaxis):
        side.set(major_formatter=LogFormatter(), minor_formatter=LogFormatter(minor_thresholds=(1.5, 0.3)))
    axes[1, 2].legend()
    return figure


def _by_tasks(fabric: "Fabric", selectors: Selectors) -> dict[str, Any]:
    """Learn fifty tasks of two classes; measure time, file size, memory, and the time of a prediction."""
    torch.manual_seed(0)
    warnings.simplefilter("ignore", cps.CapacityWarning)
    learner, images = _make_learner(fabric, selectors), torch.rand(256, 3, 16, 16)
    seconds, sizes, peaks, predict = [], [], [], {}
    with tempfile.TemporaryDirectory() as folder:
        for index in range(TASKS):
            if fabric.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            seconds.append(measure_seconds(partial(learner.learn, _make_task(index)), fabric.device))
            peaks.append(_peak_mib(fabric.device))
            learner.save(Path(folder) / "model.cps")
            sizes.append((Path(folder) / "model.cps").stat().st_size)
            if index + 1 in PREDICT_AT:
                times = [measure_seconds(partial(learner.predict, images), fabric.device) for _ in range(12)]
                predict[str(index + 1)] = statistics.median(times[5:])
    late = _late_against_early(learner, fabric, selectors)
    return {"seconds": seconds, "file_bytes": sizes, "peak_mib": peaks, "predict": predict, "late": late}


def _late_against_early(grown: cps.Learner, fabric: "Fabric", selectors: Selectors) -> tuple[float, float, float]:
    """Compare learning one more task with learning one in a new learner; they alternate, as machines change speed."""
    late, early = map(_make_task, count(TASKS)), map(_make_task, count())
    new = _make_learner(fabric, selectors)
    return compare(lambda: grown.learn(next(late)), lambda: new.learn(next(early)), fabric.device, pairs=10)


def _make_learner(fabric: "Fabric", selectors: Selectors) -> cps.Learner:
    training = cps.Training(3, cps.Adam(1e-3), batch_size=64)
    return cps.Learner(
        cps.SmallConvNet(3, (64, 128, 128)), rounds=1, train=training, retrain=training, fabric=fabric,
        pruner=cps.NNrelief(0.6), selectors=selectors,
    )  # fmt: skip


def _make_task(index: int) -> cps.Task:
    images, labels = torch.rand(192, 3, 16, 16) ** (1 + index / 10), [2 * index + number % 2 for number in range(192)]
    return cps.Task([2 * index, 2 * index + 1], train=(images, labels))


def _by_size(fabric: "Fabric") -> dict[str, list[dict[str, float]]]:
    """Compare masked and dense steps along each axis, with the middle value of all others."""
    middle = {"classes": 10, "layers": 2, "image size": 16, "batch": 64}
    along = {"classes": (2, 10, 100, 1000), "layers": (1, 2, 4), "image size": (8, 16, 32, 64), "batch": (16, 64, 256)}
    return {
        axis: [_measure_point(axis, size, middle, fabric.device) for size in sizes] for axis, sizes in along.items()
    }


def _measure_point(axis: str, size: int, middle: dict[str, int], device: torch.device) -> dict[str, float]:
    at = {**middle, axis: size}

    def backbone() -> nn.Module:
        return ResNet(3, (16, 32), at["layers"], shortcuts="convolution", last_relu=True, fan="fan_in").to(device)

    images = torch.randn(at["batch"], 3, at["image size"], at["image size"], device=device)
    labels = torch.randint(0, at["classes"], (at["batch"],), device=device)
    dense = plain_step(Classifier(backbone(), nn.Linear(32, at["classes"])).to(device), images, labels)
    masked = masked_step(half_taken_draft(backbone(), 32, device, at["classes"]), images, labels)
    ours, plain, ratio = compare(masked, dense, device, pairs=7)
    layers = 2 + 4 * size if axis == "layers" else size
    return {"at": layers, "ours": ours, "dense": plain, "ratio": ratio}


def _peak_mib(device: torch.device) -> float:
    """Return the peak memory so far on a CPU, or since the last reset on a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def _differences(values: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(values)]


def _growth_row(label: str, values: list[float]) -> dict[str, Any]:
    added = _differences(values)
    late, early = math.fsum(added[40:]) / len(added[40:]), math.fsum(added[WARM_UP:15]) / len(added[WARM_UP:15])
    return make_row(label, f"{late / 1024:.1f} KiB", f"{early / 1024:.1f} KiB", late / early)


def _panel(axis: Any, numbers: Any, values: list[float], title: str, label: str) -> None:
    axis.plot(numbers, values)
    axis.set(title=title, xlabel=label, ylim=(0, 1.3 * max(values)))
