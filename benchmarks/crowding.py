"""`python -m benchmarks.crowding --out FILE`: what tasks still learn in a network that is full.

The digits in five tasks of two, a network so small that the first tasks take all of it. Each way of sharing the room
is measured over several class orders, on the task-IL accuracy of each task.
"""

import argparse
import warnings
from pathlib import Path
from typing import Any

import cps
from benchmarks.paper import compact
from cps.experiments.recipes import RECIPES
from cps.runtime.environment import describe_device, versions
from cps.runtime.seeding import seeded
from cps.storage.container import write_text

ORDERS = range(10)
WAYS = {
    "all sealed weights, as in the paper": cps.Capacity(crowded=0.0),
    "choosing among sealed weights": cps.Capacity(),
    "a budget of a fifth of each layer": cps.Capacity(crowded=0.0, budget=0.1),
}


def main() -> None:
    """Measure every way and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--width", type=int, default=6)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", cps.CapacityWarning)
    fabric = cps.make_fabric(accelerator="cpu")
    ways = {}
    for name, capacity in WAYS.items():
        ways[name] = [_measure(capacity, arguments.width, order, fabric) for order in ORDERS]
        print(name, [round(sum(run["task_il"]) / 5, 1) for run in ways[name]], flush=True)
    found = {"device": describe_device(fabric), "versions": versions(), "width": arguments.width, "ways": ways}
    write_text(arguments.out, compact(found))


def _measure(capacity: cps.Capacity, width: int, order: int, fabric: Any) -> dict[str, Any]:
    recipe = RECIPES["digits"]()
    with seeded(fabric.device, order):
        backbone = cps.SmallConvNet(channels=1, widths=(width, 2 * width, 2 * width))
    settings = {**recipe.learner_settings(), "selectors": (cps.MaxOutput(),), "pruner": cps.NNrelief(alpha=0.98)}
    learner = cps.Learner(backbone, **{**settings, "capacity": capacity}, seed=order, fabric=fabric)
    tasks = list(recipe.scenario(None, order))
    free = []
    for task in tasks:
        learner.learn(task)
        free.append(100 * learner.network.free_share())
    found: dict[str, Any] = cps.evaluate(learner, tasks, group_sizes=[1])
    return {"order": order, "task_il": found["task_il"]["accuracy"][-1], "free": free}


if __name__ == "__main__":
    main()
