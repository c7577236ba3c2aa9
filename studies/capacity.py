"""`python -m studies.capacity --out FILE`: how well tasks are learned when the network is full.

The digits in five tasks of two classes, with a network so small that the first tasks take all of it. Each way of
sharing the weights is measured by the task-IL accuracy of each task, over several class orders.
"""

import argparse
import statistics
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cps
from cps.experiments.aggregate import format_mean
from cps.experiments.recipes import RECIPES
from cps.runtime.environment import describe_device, versions
from cps.runtime.seeding import seeded
from studies.published import closed_form_run, describe_machine, markdown, read_json, write_compact

if TYPE_CHECKING:
    from lightning_fabric import Fabric

ORDERS = range(10)
CAPACITIES = {
    "all sealed weights, as in the paper": cps.Capacity(min_free=0.0),
    "choosing among sealed weights": cps.Capacity(),
    "a budget of a fifth of each layer": cps.Capacity(min_free=0.0, budget=0.1),
}


def main() -> None:
    """Measure every way of sharing the weights and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--width", type=int, default=6, help="channels of the first layer")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", cps.CapacityWarning)
    fabric = cps.make_fabric(accelerator="cpu")
    results = {}
    for name, capacity in CAPACITIES.items():
        results[name] = [_measure(capacity, arguments.width, order, fabric) for order in ORDERS]
        print(name, [round(sum(run["task_il"]) / 5, 1) for run in results[name]], flush=True)
    machine = {"device": describe_device(fabric), "versions": versions()}
    write_compact(arguments.out, {**machine, "width": arguments.width, "ways": results})


def capacity_table() -> str:
    """Return the table of the accuracy on each task by the way of sharing the weights."""
    run = read_json("crowding-cpu")
    tasks = range(len(next(iter(run["ways"].values()))[0]["task_il"]))
    rows = []
    for name, runs in run["ways"].items():
        by_task = [statistics.fmean(each["task_il"][task] for each in runs) for task in tasks]
        means = [statistics.fmean(each["task_il"]) for each in runs]
        free = statistics.fmean(each["free"][-1] for each in runs)
        rows.append([name, *(f"{value:.1f}" for value in by_task), format_mean(means), f"{free:.0f}"])
    closed = [closed_form_run(f"digits-{each['order']}") for each in next(iter(run["ways"].values()))]
    known = [entry["task known"] for entry in closed if entry is not None]
    rows.append(["closed form, nothing trained", *("" for _ in tasks), format_mean(known), ""])
    head = [
        "how tasks share the weights",
        *(f"task {task + 1}" for task in tasks),
        "mean",
        "free weights at the end (%)",
    ]
    orders = len(next(iter(run["ways"].values())))
    note = f"Task-IL accuracy (%), mean over {orders} class orders; {describe_machine(run['device'], run['versions'])}."
    return markdown(head, rows, note)


def _measure(capacity: cps.Capacity, width: int, order: int, fabric: "Fabric") -> dict[str, Any]:
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
    evaluation = cps.evaluate(learner, tasks, group_sizes=[1])
    return {"order": order, "task_il": evaluation.task_il.accuracy[-1].tolist(), "free": free}


if __name__ == "__main__":
    main()
