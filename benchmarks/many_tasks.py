"""`python -m benchmarks.many_tasks`: the time and accuracy of predictions with 10, 100 and 1,000 tasks.

Each task has two classes, random patterns of 8 x 8 values with noise. Beyond `Fusion.cascade_tasks` only the likely
subnetworks run; at the end their accuracy is compared with that of running all. It takes about ten minutes.
"""

import argparse
import statistics
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cps
from benchmarks import RESULTS
from cps.network.cost import measure_seconds
from cps.runtime.environment import describe_device, versions
from cps.storage.atomic import write_json

AT = (10, 100, 1000)  # numbers of tasks at which predictions are timed
BATCHES = (1, 128)
NOISE = 1.5
TRAIN, TEST = 24, 2  # images of each class


def main() -> None:
    """Learn the tasks, measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "many-tasks-cpu.json")
    parser.add_argument("--tasks", type=int, nargs="+", default=AT)
    options = parser.parse_args()
    warnings.simplefilter("ignore", cps.CapacityWarning)
    found = measure(options.tasks)
    write_json(options.out, found)
    for number, row in found["tasks"].items():
        print(number, row)
    print({name: value for name, value in found.items() if name != "tasks"})


def measure(numbers: list[int]) -> dict[str, Any]:
    """Return times by number of tasks, and the accuracy of running likely subnetworks and all of them."""
    fabric = cps.make_fabric(accelerator="cpu")
    training = cps.Training(2, cps.Adam(3e-3), batch_size=16)
    selectors = (cps.Fusion(), cps.MaxOutput())
    learner = cps.Learner(
        cps.SmallConvNet(1, (32, 64, 64)), rounds=1, train=training, retrain=training, fabric=fabric,
        pruner=cps.NNrelief(0.5), selectors=selectors,
    )  # fmt: skip
    draws = torch.Generator().manual_seed(0)
    tests: list[Tensor] = []
    rows: dict[str, Any] = {}
    seconds: list[float] = []
    for task in range(max(numbers)):
        patterns = torch.randn(2, 1, 8, 8, generator=draws)
        start = time.perf_counter()
        learner.learn(cps.Task([2 * task, 2 * task + 1], train=_draw(patterns, 2 * task, TRAIN, draws)))
        seconds.append(time.perf_counter() - start)
        tests.append(_draw(patterns, 2 * task, TEST, draws)[0])
        if task + 1 in numbers:
            images = torch.cat(tests)
            rows[str(task + 1)] = {
                "learning a task": statistics.median(seconds[-9:]),
                **{f"batch of {batch}": _prediction_seconds(learner, images, batch) for batch in BATCHES},
                "bytes of a task": sum(
                    value.nbytes for value in learner.network.subnetworks[-1].statistics["Fusion"].values()
                ),
                "accuracy": _accuracy(learner, images, cps.Fusion()),
            }
            print(task + 1, rows[str(task + 1)], flush=True)
    images = torch.cat(tests)
    likely, every = replace(cps.Fusion(), cascade_tasks=0), replace(cps.Fusion(), cascade_tasks=0, certainty=1.0)
    return {
        "tasks": rows,
        "likely": _accuracy(learner, images, likely),
        "all": _accuracy(learner, images, every),
        "images": len(images),
        "device": describe_device(fabric),
        "versions": versions(),
    }


def _draw(patterns: Tensor, first: int, number: int, draws: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return noisy images of both patterns, which take turns, and their labels from `first`."""
    images = patterns.repeat(number, 1, 1, 1) + NOISE * torch.randn(2 * number, 1, 8, 8, generator=draws)
    return images, first + torch.arange(2 * number) % 2


def _prediction_seconds(learner: cps.Learner, images: Tensor, batch: int) -> float:
    """Return the median time of predicting a batch of images, other ones each time."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    batches = [images[order[torch.arange(start, start + batch) % len(images)]] for start in range(0, 40 * batch, batch)]
    learner.predict(images[:: max(1, len(images) // 2000)])  # so that compact networks exist
    times = [measure_seconds(lambda part=part: learner.predict(part), learner.network.device) for part in batches]
    return statistics.median(times)


def _accuracy(learner: cps.Learner, images: Tensor, selector: cps.Selector) -> float:
    """Return the percentage of images that get the right class."""
    predicted = learner.predict(images, selector=selector).classes
    truth = [2 * (index // (2 * TEST)) + index % 2 for index in range(len(images))]
    return 100 * sum(a == b for a, b in zip(predicted, truth, strict=True)) / len(truth)


if __name__ == "__main__":
    main()
