"""`python -m benchmarks.paper --data DIR`: the published runs, of the paper's recipes and of those for single images.

A run that was stopped goes on when the same command is given again; finished ones are not run again. Compact results go
to benchmarks/results, from which `python -m benchmarks.tables` makes the tables.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.records import RESULTS

ORDERS = ("1993", "1605", "2022")
RUNS = [f"{recipe}:{order}" for recipe in ("cifar100-10", "cifar100-20", "cifar100-5") for order in ORDERS]
RUNS += [f"{recipe}:{order}" for recipe in ("cifar100-b50", "cifar100-b50-frozen") for order in ORDERS]
RUNS += ["cifar100-50:1993", "cub200:sorted"]
RUNS += [f"cifar100-{cut}-single:{order}" for order in ORDERS for cut in ("10", "20", "5", "b50")]
BOUNDED = {"cifar100-10:1993"}  # finetuning and joint training run beside these


def main() -> None:
    """Run what was asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", default=RUNS, help="RECIPE:ORDER, the order a seed or 'sorted'")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/paper"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--at-once", type=int, default=1, help="runs that share the machine")
    parser.add_argument("--more", default="", help="further options of `cps bench`")
    arguments = parser.parse_args()
    with ThreadPoolExecutor(arguments.at_once) as pool:
        done = list(pool.map(partial(_run, arguments), arguments.runs))
    failed = [run for run, is_done in zip(arguments.runs, done, strict=True) if not is_done]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def compact(results: dict[str, Any]) -> str:
    """Return results as JSON with two digits after the point, a line for each key."""
    lines = [f" {json.dumps(key)}: {json.dumps(_rounded(value))}" for key, value in results.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _run(arguments: argparse.Namespace, run: str) -> bool:
    recipe, order = run.split(":")
    folder = arguments.out / f"{recipe}-{order}"
    results = folder / "results.json"
    if not results.exists():
        began = time.monotonic()
        command = [sys.executable, "-m", "cps", "bench", recipe, "--data", str(arguments.data), "--out", str(folder)]
        command += [] if order == "sorted" else ["--order", order]
        command += [] if recipe.endswith("-single") else ["--flips"]  # those look at mirror images anyway
        command += ["--bounds" if run in BOUNDED else "--no-bounds", *arguments.more.split()]
        threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // arguments.at_once))}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | threads)
        print(f"{run}: {time.monotonic() - began:.0f} s\n{(done.stdout + done.stderr)[-1500:]}", flush=True)
    if results.exists():
        arguments.results.mkdir(parents=True, exist_ok=True)
        (arguments.results / f"{recipe}-{order}.json").write_text(compact(json.loads(results.read_text())))
    return results.exists()


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 2)
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    return [_rounded(entry) for entry in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
