"""`python -m studies.precision ORDER... --out FILE`: learn the digits in float32 and in bfloat16, and compare accuracy.

Each class order is learned in both precisions by the recipe `digits`, in two runs that differ in nothing else.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import cps
from cps.experiments.aggregate import format_mean
from cps.experiments.recipes import RECIPES
from cps.experiments.run import Run
from cps.runtime.environment import describe_device, versions
from studies.published import describe_machine, markdown, read_json, write_compact

PRECISIONS = {"32-true": "float32", "bf16-mixed": "bfloat16"}
MEASURES = {"task known": "task known", "20": "groups of 20", "1": "one image"}


def main() -> None:
    """Measure the given orders; what is already in the file is not repeated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("orders", nargs="+", type=int, help="seeds of the class orders")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    done: dict[str, Any] = (
        json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {"runs": []}
    )
    known = {(run["order"], run["precision"]) for run in done["runs"]}
    for order in arguments.orders:
        for precision in PRECISIONS:
            if (order, precision) not in known:
                done["runs"].append(measure(order, precision))
                done |= {"device": describe_device(cps.make_fabric(accelerator="cpu")), "versions": versions()}
                write_compact(arguments.out, done)
                print(done["runs"][-1], flush=True)


def measure(order: int, precision: str) -> dict[str, Any]:
    """Return the accuracy of one run of the recipe in percent, and the CPU time that it takes."""
    fabric = cps.make_fabric(accelerator="cpu", precision=precision)
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        run = Run(RECIPES["digits"](), Path(folder), fabric, order=order, group_sizes=(1, 20), bounds=False)
        results = run.start()
    found = {str(size): metrics.ACC for size, metrics in results.class_il[results.default_selector].items()}
    accuracy = {"task known": results.task_il.ACC, **found}
    seconds = time.process_time() - start
    return {"order": order, "precision": precision, "accuracy": accuracy, "CPU seconds": round(seconds, 1)}


def accuracy_table() -> str:
    """Return the table of accuracies and CPU times in both precisions."""
    measured = read_json("precision-digits")
    by_precision = {name: [run for run in measured["runs"] if run["precision"] == name] for name in PRECISIONS}
    orders = [{run["order"] for run in runs} for runs in by_precision.values()]
    assert orders[0] == orders[1], "some orders were measured in one precision only"

    def column(precision: str, key: str) -> np.ndarray:
        runs = sorted(by_precision[precision], key=lambda run: run["order"])
        return np.array([run["CPU seconds"] if key == "CPU seconds" else run["accuracy"][key] for run in runs])

    keys = [*MEASURES, "CPU seconds"]
    rows = [[label, *(format_mean(list(column(name, key))) for key in keys)] for name, label in PRECISIONS.items()]
    changes = [column("bf16-mixed", key) - column("32-true", key) for key in MEASURES]
    rows.append(["difference by order", *(format_mean(list(change)) for change in changes), ""])
    machine = describe_machine(measured["device"], measured["versions"])
    note = f"Recipe `digits`, test images, ACC in %; mean and standard deviation over {len(orders[0])} class orders; "
    note += f"{machine}."
    return markdown(["precision", *MEASURES.values(), "CPU seconds"], rows, note)


if __name__ == "__main__":
    main()
